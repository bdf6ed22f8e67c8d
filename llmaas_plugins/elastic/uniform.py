"""Choose widths as ElastiLM does: the same share in all layers except the anchors (§3.2)."""

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
"""Levels of the paper: 100 % to 20 %."""

_ANCHOR_SHARE = 0.2
_LEAST_STEP = 32
_ROUNDING = 1e-9


def anchors_of(losses: NDArray[np.float64]) -> tuple[int, ...]:
    """Return the fifth of the layers whose removal raises the loss most, in ascending order."""
    n_anchors = round(_ANCHOR_SHARE * len(losses))
    return tuple(sorted(np.argsort(-losses, kind="stable")[:n_anchors].tolist()))


def step_of(blocks: Blocks) -> int:
    """Return how many neurons to leave out together: whole blocks of ``ffn_down``'s type."""
    return math.lcm(blocks.granule, _LEAST_STEP)


def uniform_widths(
    blocks: Blocks, levels: Sequence[float], losses: NDArray[np.float64], step: int
) -> tuple[Widths, ...]:
    """Return the widths of each level: the widest that stay within its share of the blocks' bytes.

    Groups come in larger units than neurons, so neurons make up the difference. A group and
    ``step`` neurons of each layer always stay. Once all other layers are that narrow, anchors
    become narrower, too; the paper does not say so.

    Args:
        blocks: Blocks of the model.
        levels: Shares in descending order.
        losses: Increase of the loss without each layer; ``(n_layers,)``.
        step: Neurons that are left out together.

    Returns:
        Widths by level; each level's units are among those of the level before.
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
    """Units of a layer that are left out together. Cuts are applied in ascending order.

    Attributes:
        is_anchor: Whether the layer is an anchor.
        left_out: Share of the layer's units left out, at the middle of this cut.
        loss: Loss without the layer.
        layer: Index of the layer.
        is_attention: Whether the units are groups, not neurons.
        width: Number of units that stay.
        n_bytes: Bytes that are left out.
    """

    is_anchor: bool
    left_out: float
    loss: float
    layer: int
    is_attention: bool
    width: int
    n_bytes: float


class _Units(NamedTuple):
    """Number of a layer's units, how many are left out together, and bytes of each."""

    n: int
    step: int
    n_bytes: float


def _cuts(blocks: Blocks, losses: NDArray[np.float64], step: int) -> list[_Cut]:
    """Return all possible cuts, in order."""
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
    """Return each width except the narrowest, with the next narrower one."""
    widths = [units.n, *range((units.n - 1) // units.step * units.step, 0, -units.step)]
    return itertools.pairwise(widths)
