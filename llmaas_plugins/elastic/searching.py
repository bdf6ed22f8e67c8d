"""Search widths by layer, trading quality for bytes.

The paper gives all layers except the anchors the same share. Real layers differ more than that, and
so do attention and neurons. The search repeatedly leaves out the units that raise the loss least
per byte. The loss is all that it asks about a model, so its result depends on nothing else.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from llmaas_plugins.elastic.units import Blocks, Widths, all_units

__all__ = ["Search", "n_losses", "not_worse"]

Loss = Callable[[Widths], float]
"""Loss of a model with the given widths; lower is better."""

_N_NEURON_STEPS, _N_GROUP_STEPS = 96, 48
"""Numbers of steps into which all layers' neurons and groups are divided, at least one a layer."""


@dataclass(frozen=True, slots=True)
class _Step:
    """Units of a layer that are left out together.

    A width is all units, or a multiple of ``n_least``. At least ``n_least`` units stay.
    """

    layer: int
    is_attention: bool
    n_units: int
    n_least: int

    def narrowed(self, widths: Widths) -> Widths | None:
        """Return the widths after this step, or None if only ``n_least`` units are left."""
        groups, neurons = widths.groups.copy(), widths.neurons.copy()
        of = groups if self.is_attention else neurons
        if of[self.layer] <= self.n_least:
            return None
        of[self.layer] = max(-(-(of[self.layer] - self.n_units) // self.n_least), 1) * self.n_least
        return Widths(groups, neurons)


class Search:
    """Lazy greedy removal of units, from all of them to ever smaller shares of the blocks' bytes.

    A step's cost is measured again only when it is the cheapest known. Costs mostly grow as more
    units are left out (Minoux 1978), so few steps are measured again after each step.
    """

    def __init__(
        self,
        blocks: Blocks,
        loss: Loss,
        *,
        least: int,
        progress: Callable[[float], None] = lambda _share: None,
    ) -> None:
        """Start with all units.

        Args:
            blocks: Blocks of the model.
            loss: Loss function; it is called many times.
            least: Least neurons that a layer keeps. A layer that lost neurons has a multiple of
                this number.
            progress: Called with the share of all work that is done, about.
        """
        self._blocks, self._loss, self._progress = blocks, loss, progress
        self._steps = _steps(blocks, least)
        # Entries: cost of a step, its number, and the number of steps taken when it was measured.
        self._heap = [(-np.inf, number, -1) for number in range(len(self._steps))]
        self._n_taken, self._n_measured = 0, 0
        self._widths = all_units(blocks)
        self._now: float | None = None

    def narrow(self, share: float) -> Widths:
        """Leave out units until at most this share is left, or every layer is at its least width.

        The result's units are among those of the result before.
        """
        while self._blocks.share(self._widths) > share:
            cheapest = self._next()
            if cheapest is None:
                break
            self._widths = cheapest
        return self._widths

    def go_on_from(self, widths: Widths) -> None:
        """Continue with other widths, of which the next results will be parts."""
        self._widths, self._now = widths, None
        self._n_taken += 1

    def _next(self) -> Widths | None:
        """Take the cheapest step; return the result, or None if no step is left."""
        if self._now is None:
            self._now = self._loss(self._widths)
        while self._heap:
            cost, number, measured = heapq.heappop(self._heap)
            narrowed = self._steps[number].narrowed(self._widths)
            if narrowed is None:
                continue
            if measured == self._n_taken:
                self._n_taken += 1
                self._now += cost * self._saved(narrowed)
                heapq.heappush(self._heap, (cost, number, measured))
                return narrowed
            cost = (self._loss(narrowed) - self._now) / self._saved(narrowed)
            heapq.heappush(self._heap, (cost, number, self._n_taken))
            self._report()
        return None

    def _saved(self, narrowed: Widths) -> float:
        """Return the share of bytes that a step saves."""
        return self._blocks.share(self._widths) - self._blocks.share(narrowed)

    def _report(self) -> None:
        """Report progress: measuring each step once, then the share that is left out."""
        self._n_measured += 1
        first = min(self._n_measured / len(self._steps), 1)
        self._progress(_FIRST_WORK * first + (1 - _FIRST_WORK) * (1 - self._share()))

    def _share(self) -> float:
        return self._blocks.share(self._widths)


_LOSSES_PER_STEP = 2
"""Losses measured for each step of the reference model's search."""
_FIRST_WORK = 0.1
"""Share of the work in measuring each step once."""


def n_losses(blocks: Blocks, least: int) -> int:
    """Return about how many losses a search down to the narrowest levels measures."""
    steps = _steps(blocks, least)
    n_steps = blocks.n_groups / steps[0].n_units + blocks.n_ff / steps[-1].n_units
    return int(_LOSSES_PER_STEP * blocks.n_layers * n_steps)


def not_worse(
    search: Search, shares: Sequence[float], uniform: Sequence[Widths], judge: Loss
) -> list[Widths]:
    """Return searched widths by share, or the uniform ones where another text judges these better.

    Each result must be part of the one before. So where the uniform widths are better, they also
    replace all wider results, and the search goes on from them.

    Args:
        search: Search that has not begun.
        shares: Largest shares allowed, in descending order.
        uniform: Uniform widths by share.
        judge: Loss on text that the search does not use.
    """
    found: list[Widths] = []
    for share, even in zip(shares, uniform, strict=True):
        widths = search.narrow(share)
        if found and judge(even) < judge(widths):
            found, widths = list(uniform[: len(found)]), even
            search.go_on_from(even)
        found.append(widths)
    return found


# -- inside --------------------------------------------------------------------------------------


def _steps(blocks: Blocks, least: int) -> list[_Step]:
    """Return the steps of all layers: larger ones in models of many layers, in equal numbers."""
    n_layers, granule = blocks.n_layers, blocks.group_granule
    groups = _size(blocks.n_groups, _N_GROUP_STEPS / n_layers, granule)
    neurons = _size(blocks.n_ff, _N_NEURON_STEPS / n_layers, least)
    steps = [_Step(i, True, groups, granule) for i in range(n_layers)]
    return steps + [_Step(i, False, neurons, least) for i in range(n_layers)]


def _size(n_units: int, n_steps: float, granule: int) -> int:
    """Return the size of a step: a multiple of the granule that needs at most ``n_steps``."""
    return max(1, round(n_units / max(n_steps, 1) / granule)) * granule
