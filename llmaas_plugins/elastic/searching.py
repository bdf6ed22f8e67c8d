"""Search widths by layer, trading quality for time.

The paper gives all layers except the anchors the same share. Real layers differ more than that, and
so do attention and neurons. The search repeatedly leaves out the units that raise the loss least
per unit of time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from llmaas_plugins.elastic.units import Blocks, Widths, all_units

__all__ = ["UnitTimes", "search"]

Loss = Callable[[Widths], float]
"""Loss of a model with the given widths; lower is better."""


class UnitTimes(NamedTuple):
    """Times of a layer's units, in any common unit of time.

    Attributes:
        group: Time of a KV group's query heads.
        neuron: Time of a neuron.
    """

    group: float
    neuron: float


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


def search(  # noqa: PLR0913 -- the model, its targets, and the functions that judge it
    blocks: Blocks,
    shares: Sequence[float],
    loss: Loss,
    times: UnitTimes,
    *,
    step: int,
    least: int,
    progress: Callable[[float], None] = lambda _share: None,
) -> list[Widths]:
    """Search widths for each share of the blocks' bytes, by lazy greedy removal of units.

    The search starts with all units. A step's cost is measured again only when it is the cheapest
    known. Costs mostly grow as more units are left out (Minoux 1978), so few steps are measured
    again after each step.

    Args:
        blocks: Blocks of the model.
        shares: Largest shares allowed, in descending order.
        loss: Loss function; it is called many times.
        times: Times of units.
        step: Most neurons to leave out in one step.
        least: Least neurons that a layer keeps. A layer that lost neurons has a multiple of this
            number.
        progress: Called with the share that is left.

    Returns:
        Widths by share; each share's units are among those of the share before.
    """
    widths = all_units(blocks)
    groups = blocks.group_granule
    steps = [_Step(i, True, groups, groups) for i in range(blocks.n_layers)]
    steps += [_Step(i, False, step, least) for i in range(blocks.n_layers)]
    frontier = _Frontier(steps, loss, times, widths)
    found = []
    for share in shares:
        while blocks.share(widths) > share:
            cheapest = frontier.next(widths)
            if cheapest is None:
                break  # every layer is at its least width
            widths = cheapest
            progress(blocks.share(widths))
        found.append(widths)
    return found


class _Frontier:
    """Possible steps, ordered by their last measured cost."""

    def __init__(
        self, steps: Sequence[_Step], loss: Loss, times: UnitTimes, widths: Widths
    ) -> None:
        self._steps, self._loss, self._times = steps, loss, times
        self._now = loss(widths)
        # Entries: cost of a step, its number, and the number of steps taken when it was measured.
        self._heap = [(-np.inf, number, -1) for number in range(len(self._steps))]
        self._n_taken = 0

    def next(self, widths: Widths) -> Widths | None:
        """Take the cheapest step from ``widths``; return the result, or None if no step is left."""
        while self._heap:
            cost, number, measured = heapq.heappop(self._heap)
            narrowed = self._steps[number].narrowed(widths)
            if narrowed is None:
                continue
            if measured == self._n_taken:
                self._n_taken += 1
                self._now += cost * self._time_saved(widths, narrowed)
                heapq.heappush(self._heap, (cost, number, measured))
                return narrowed
            cost = (self._loss(narrowed) - self._now) / self._time_saved(widths, narrowed)
            heapq.heappush(self._heap, (cost, number, self._n_taken))
        return None

    def _time_saved(self, widths: Widths, narrowed: Widths) -> float:
        n_groups = int((widths.groups - narrowed.groups).sum())
        n_neurons = int((widths.neurons - narrowed.neurons).sum())
        return n_groups * self._times.group + n_neurons * self._times.neuron
