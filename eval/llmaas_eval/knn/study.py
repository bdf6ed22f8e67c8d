"""What a history is worth to a user: a datastore by each method, fitted alike, scored alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.knn.intervals import Surprise
from llmaas_eval.knn.keys import Part, UserKeys
from llmaas_eval.knn.neighbours import Found, search
from llmaas_plugins.knn_lm.fitting import HeldOut, fit
from llmaas_plugins.knn_lm.mixing import Mixture
from llmaas_plugins.knn_lm.pairs import Pairs

__all__ = ["Chosen", "Kind", "Limits", "Method", "Row", "as_pairs", "first", "study"]

Kind = Literal["ffn", "norm"]
_HELD_SHARE = 0.1


class Chosen(NamedTuple):
    """What a method keeps of a history.

    Attributes:
        rows: Which pairs.
        weights: How many pairs each stands for, where that is stored with it.
    """

    rows: NDArray[np.integer]
    weights: NDArray[np.float32] | None = None


Method = Callable[[Pairs, int], Chosen]
"""From a history and a number of pairs to what is kept."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is looked at.

    Attributes:
        n_test: Targets that are scored, about: whole conversations.
        n_held: Targets of the training part's last tenth that settings are fitted on, likewise.
        k: Neighbours.
    """

    n_test: int
    n_held: int
    k: int = 100


class Row(NamedTuple):
    """A user's text under one method.

    Attributes:
        user: Whose.
        method: How the datastore was made.
        n_history: Pairs that it was made from.
        n_pairs: Pairs that it has.
        mixture: What was fitted; None for the model alone.
        surprise: Of the test part.
    """

    user: str
    method: str
    n_history: int
    n_pairs: int
    mixture: Mixture | None
    surprise: Surprise


def study(
    keys: UserKeys,
    methods: Mapping[str, tuple[Method, int]],
    limits: Limits,
    kind: Kind = "ffn",
    *,
    has_far: bool = True,
) -> list[Row]:
    """The model alone, then each of ``methods`` with its number of pairs."""
    held = keys.train.conv >= (1 - _HELD_SHARE) * (keys.train.conv[-1] + 1)
    history = as_pairs(keys.train.rows(~held), kind)
    fitted_on, scored = first(keys.train.rows(held), limits.n_held), first(keys.test, limits.n_test)
    chosen = {name: method(history, n) for name, (method, n) in methods.items()}
    subsets = [some.rows for some in chosen.values()]
    found = [
        search(_keys(part, kind), history.keys, subsets, limits.k) for part in (fitted_on, scored)
    ]
    rows = [Row(keys.name, "pure", len(history), 0, None, Surprise.of(scored.p, scored.conv))]
    for (name, some), for_fit, for_test in zip(chosen.items(), *found, strict=True):
        mixture = fit(_met(fitted_on, for_fit, history, some), has_far=has_far).mixture
        p = _probability(mixture, _met(scored, for_test, history, some))
        surprise = Surprise.of(p, scored.conv)
        rows.append(Row(keys.name, name, len(history), len(some.rows), mixture, surprise))
    return rows


def as_pairs(part: Part, kind: Kind) -> Pairs:
    """As the plugin has them."""
    return Pairs(_keys(part, kind), part.values, part.p, part.max)


def first(part: Part, n: int) -> Part:
    """Its first conversations, whole, that have ``n`` targets together."""
    last = part.conv[min(n, len(part)) - 1]
    return part.rows(part.conv <= last)


def _keys(part: Part, kind: Kind) -> NDArray[np.float16]:
    return part.ffn if kind == "ffn" else part.norm


def _met(part: Part, found: Found, history: Pairs, chosen: Chosen) -> HeldOut:
    weights = np.ones(len(history), np.float32)
    if chosen.weights is not None:
        weights[chosen.rows] = chosen.weights
    hits = history.values[found.rows] == part.values[:, None]
    return HeldOut(found.distances, hits, weights[found.rows], part.p, part.max)


def _probability(mixture: Mixture, met: HeldOut) -> NDArray[np.float32]:
    return mixture.probability(met.distances, met.hits, met.weights, met.p_lm, met.p_max)
