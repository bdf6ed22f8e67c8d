"""Widths by layer: what leaving units out costs in quality, per time that it saves.

The paper gives all layers but anchors one share. Layers differ more than that, and so do attention
and neurons: the search leaves out, again and again, what raises the loss least per unit of time.
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
"""Of a model with these widths: lower is better."""


class UnitTimes(NamedTuple):
    """What a layer's units take, in any one unit of time.

    Attributes:
        group: A KV group's query heads.
        neuron: A neuron.
    """

    group: float
    neuron: float


@dataclass(frozen=True, slots=True)
class _Step:
    """Units of a layer that are left out at once, and how many stay at least.

    What stays, but for all of them, is a multiple of the least.
    """

    layer: int
    is_attention: bool
    n_units: int
    n_least: int

    def narrowed(self, widths: Widths) -> Widths | None:
        """What remains; None: there was no more than the least."""
        groups, neurons = widths.groups.copy(), widths.neurons.copy()
        of = groups if self.is_attention else neurons
        if of[self.layer] <= self.n_least:
            return None
        of[self.layer] = max(-(-(of[self.layer] - self.n_units) // self.n_least), 1) * self.n_least
        return Widths(groups, neurons)


def search(  # noqa: PLR0913 -- of what, for what, by what
    blocks: Blocks,
    shares: Sequence[float],
    loss: Loss,
    times: UnitTimes,
    *,
    step: int,
    least: int,
    progress: Callable[[float], None] = lambda _share: None,
) -> list[Widths]:
    """Widths for each share of the blocks' bytes, by lazy greedy search from all units down.

    What a step costs is asked anew only when it is the cheapest known: costs mostly grow as more is
    left out (Minoux 1978), so few of them are asked again after each step.

    Args:
        blocks: Of the model.
        shares: From the largest to the smallest; widths of each take no more than that.
        loss: Called with widths, many times.
        times: Of units.
        step: Neurons that are left out at once, at most.
        least: Neurons that a layer keeps, beside a group; wider layers that are cut have a multiple
            of them.
        progress: Told what share is left.

    Returns:
        Widths by share; each share's are within those of the one before.
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
                break  # floors
            widths = cheapest
            progress(blocks.share(widths))
        found.append(widths)
    return found


class _Frontier:
    """Steps that can be taken, cheapest first as far as is known."""

    def __init__(
        self, steps: Sequence[_Step], loss: Loss, times: UnitTimes, widths: Widths
    ) -> None:
        self._steps, self._loss, self._times = steps, loss, times
        self._now = loss(widths)
        # cost of a step, its number, and what it was last measured at
        self._heap = [(-np.inf, number, -1) for number in range(len(self._steps))]
        self._n_taken = 0

    def next(self, widths: Widths) -> Widths | None:
        """What the cheapest step leaves of ``widths``; None: there is none."""
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
