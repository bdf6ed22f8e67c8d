"""Methods to make a datastore of limited size from a history."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.knn.baselines import merge, random_pairs
from llmaas_eval.knn.scoring import Chosen, Method
from llmaas_plugins.knn_lm.archive.pairs import Pairs
from llmaas_plugins.knn_lm.build.archive_source import initial_objective
from llmaas_plugins.knn_lm.selection.algorithms import Choice, Selection, offline, online
from llmaas_plugins.knn_lm.selection.objective import Objective
from llmaas_plugins.knn_lm.selection.priority_sampling import PrioritySampler

__all__ = ["METHODS", "OURS", "RIVALS", "without_weights"]


def without_weights(n: int, n_embd: int) -> int:
    """Return how many pairs without weights take the bytes of ``n`` pairs with weights."""
    pair = 2 * n_embd + 4
    return n * (pair + 4) // pair


class _Source:
    """A history in the form that the selection reads."""

    def __init__(self, history: Pairs) -> None:
        self.values, self.p_lm, self.n_dims = history.values, history.p_lm, history.n_embd
        self._keys = history.keys

    def keys(self, indices: NDArray[np.int64]) -> NDArray[np.float32]:
        return self._keys[indices].astype(np.float32)


def _full(history: Pairs, n: int) -> Chosen:
    del n
    return Chosen(np.arange(len(history)))


def _random(history: Pairs, n: int) -> Chosen:
    return Chosen(random_pairs(len(history), without_weights(n, history.n_embd)).indices)


def _merging(history: Pairs, n: int) -> Chosen:
    found = merge(history.keys.astype(np.float32), history.values, n)
    return Chosen(found.indices, found.weights)


def _selected(select: Callable[..., Selection], how: Choice) -> Method:
    def choose(history: Pairs, n: int) -> Chosen:
        source: Any = _Source(history)
        objective: Objective = initial_objective(source, 0)
        found = select(source, n, objective, how=how)
        order = np.argsort(found.indices)
        return Chosen(found.indices[order], found.weights[order])

    return choose


def _stream(history: Pairs, n: int) -> Chosen:
    source: Any = _Source(history)
    stream = PrioritySampler(source, n, initial_objective(source, 0))
    for _ in stream.advance(len(history), is_end=True):
        pass
    found = stream.kept.selection()
    return Chosen(found.indices, found.weights)


METHODS: Mapping[str, Method] = {
    "full": _full,
    "random": _random,
    "merging": _merging,
    "offline": _selected(offline, "draw"),
    "stream": _stream,
    "online": _selected(online, "draw"),
    "offline, top": _selected(offline, "top"),
    "online, top": _selected(online, "top"),
}
"""Function of each method, by the method's name.

``top`` takes the pairs with the highest bounds, as the paper does. ``online`` is Algorithm 2.
``stream`` is the plugin's method for conversations as they arrive.
"""

OURS = ("offline", "stream", "online")
RIVALS = ("random", "merging")
