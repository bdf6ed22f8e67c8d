"""Widths as ElastiLM chooses them: one share for all layers but the anchors (§3.2)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_plugins.elastic.units import Blocks, Widths, all_units

__all__ = ["LEVELS", "anchors_of", "step_of", "uniform_widths"]

LEVELS = tuple(n / 10 for n in range(10, 1, -1))
"""The paper's: 100 % to 20 %."""

_ANCHOR_SHARE = 0.2
_LEAST_STEP = 32
_ROUNDING = 1e-9


def anchors_of(losses: NDArray[np.float64]) -> tuple[int, ...]:
    """The fifth of the layers whose removal raises the loss most, in the order of layers."""
    n_anchors = round(_ANCHOR_SHARE * len(losses))
    return tuple(sorted(np.argsort(-losses, kind="stable")[:n_anchors].tolist()))


def step_of(blocks: Blocks) -> int:
    """Neurons that are left out at once: whole blocks of ``ffn_down``'s type."""
    return math.lcm(blocks.granule, _LEAST_STEP)


def uniform_widths(
    blocks: Blocks, levels: Sequence[float], losses: NDArray[np.float64], step: int
) -> tuple[Widths, ...]:
    """Widths of each level: the most that take no larger share of the blocks' bytes.

    A layer's groups are a coarser measure than its neurons: these make up for them. A group and
    ``step`` neurons of each layer always stay. Where that is all that is left of other layers,
    anchors give way, too, which the paper does not say.

    Args:
        blocks: Of the model.
        levels: Shares, from the largest to the smallest.
        losses: By layer: how much the loss grows without it; ``(n_layers,)``.
        step: Neurons that are left out at once.

    Returns:
        By level; each one's are within those of the one before.
    """
    n_bytes = [blocks.n_groups * group for group in blocks.group_bytes]
    n_bytes += [blocks.n_ff * neuron for neuron in blocks.neuron_bytes]
    left = total = math.fsum(n_bytes)
    full = all_units(blocks)
    groups, neurons = full.groups, full.neurons
    cuts, found = iter(_cuts(blocks, losses, step)), []
    for level in levels:
        while left > (level + _ROUNDING) * total and (cut := next(cuts, None)) is not None:
            (groups if cut.is_attention else neurons)[cut.layer] = cut.width
            left -= cut.n_bytes
        found.append(Widths(groups.copy(), neurons.copy()))
    return tuple(found)


# -- inside --------------------------------------------------------------------------------------


class _Cut(NamedTuple):
    """Units of a layer that are left out at once; what sorts first is left out first.

    Attributes:
        is_anchor: The layer is one.
        left_out: Share of the layer's units that is left out then, but for half of these.
        loss: Of the layer.
        layer: From 0.
        is_attention: They are groups, not neurons.
        width: Units that stay.
        n_bytes: Of what is left out.
    """

    is_anchor: bool
    left_out: float
    loss: float
    layer: int
    is_attention: bool
    width: int
    n_bytes: float


class _Units(NamedTuple):
    """Those of a layer: how many there are, are left out at once, and bytes of each."""

    n: int
    step: int
    n_bytes: float


def _cuts(blocks: Blocks, losses: NDArray[np.float64], step: int) -> list[_Cut]:
    """All that can be left out, in order."""
    anchors, found = anchors_of(losses), list[_Cut]()
    for i in range(blocks.n_layers):
        for is_attention, units in (
            (True, _Units(blocks.n_groups, blocks.group_granule, blocks.group_bytes[i])),
            (False, _Units(blocks.n_ff, step, blocks.neuron_bytes[i])),
        ):
            for before, width in _widths(units):
                left_out = 1 - (before + width) / (2 * units.n)
                loss, n_bytes = float(losses[i]), (before - width) * units.n_bytes
                found.append(_Cut(i in anchors, left_out, loss, i, is_attention, width, n_bytes))
    return sorted(found)


def _widths(units: _Units) -> Iterable[tuple[int, int]]:
    """Each width but the narrowest, and the next narrower one."""
    widths = [units.n, *range((units.n - 1) // units.step * units.step, 0, -units.step)]
    return itertools.pairwise(widths)
