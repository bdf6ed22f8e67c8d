"""Perplexity of a user's text with a datastore made by each method, under equal conditions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.knn.keys import Part, UserKeys
from llmaas_eval.knn.neighbors import Found, search
from llmaas_eval.stats import Surprise
from llmaas_plugins.knn_lm.archive.pairs import Pairs
from llmaas_plugins.knn_lm.config import KnnLMConfig
from llmaas_plugins.knn_lm.mixing.grid_search import HeldOut, fit_mixture
from llmaas_plugins.knn_lm.mixing.mixture import Mixture
from llmaas_plugins.knn_lm.mixing.trust import trust_before

__all__ = [
    "Chosen",
    "Kind",
    "Method",
    "Row",
    "ScoringSettings",
    "as_pairs",
    "first",
    "history_of",
    "probability",
    "study",
]

Kind = Literal["ffn", "norm"]
_HELD_SHARE = 0.1
_LOOK_BACK = int(KnnLMConfig.model_fields["look_back"].default)


class Chosen(NamedTuple):
    """Pairs of a history that a method keeps.

    Attributes:
        rows: Row numbers of the kept pairs.
        weights: Number of pairs that each kept pair represents; None if weights are not stored.
    """

    rows: NDArray[np.integer]
    weights: NDArray[np.float32] | None = None


Method = Callable[[Pairs, int], Chosen]
"""Function from a history and a number of pairs to the pairs to keep."""


@dataclass(frozen=True, slots=True)
class ScoringSettings:
    """Settings of a user's study.

    Attributes:
        n_test: Targets to score, rounded up to whole conversations.
        n_held: Targets to fit settings on, from the last tenth of the training part, rounded up
            to whole conversations.
        k: Neighbors per target.
        kind: Hidden states that are the keys.
        has_far: Whether the mixture may use the model alone for states far from all stored keys.
        has_trust: Whether the mixture's weight falls where mixing did not help before.
    """

    n_test: int
    n_held: int
    k: int = 100
    kind: Kind = "ffn"
    has_far: bool = True
    has_trust: bool = True


class Row(NamedTuple):
    """Result of one method on one text of a user.

    Attributes:
        user: Name of the user, with the name of the text if it is not the user's own.
        method: Name of the method that made the datastore.
        n_history: Pairs of the history.
        n_pairs: Pairs of the datastore.
        mixture: The fitted mixture; None for the model alone.
        surprise: Surprisal of the text.
    """

    user: str
    method: str
    n_history: int
    n_pairs: int
    mixture: Mixture | None
    surprise: Surprise


def study(
    keys: UserKeys,
    methods: Mapping[str, tuple[Method, float]],
    settings: ScoringSettings,
    *,
    others: Mapping[str, Part] | None = None,
    prompts: Sequence[int] = (0,),
) -> list[Row]:
    """Score the model alone, then each of ``methods`` with its share of the history's pairs.

    Args:
        keys: A user's training part, to make datastores from, and test part, to score.
        methods: Method and share of pairs to keep, by name.
        settings: Settings of the study.
        others: Further texts to score, by name; their rows' user is "<user> on <name>".
        prompts: Numbers of first tokens to treat as a prompt (see ``probability``). Only the tokens
            after the prompt are scored. Except for 0, the rows' user ends in "after <n>".
    """
    history, fitted_on = history_of(keys, settings)
    chosen = {
        name: method(history, round(share * len(history)))
        for name, (method, share) in methods.items()
    }
    stores = _Stores(history, chosen, settings)
    mixtures = [
        fit_mixture(met, has_far=settings.has_far).mixture for met in stores.meet(fitted_on)
    ]
    texts = {keys.name: first(keys.test, settings.n_test)}
    texts |= {f"{keys.name} on {name}": part for name, part in (others or {}).items()}
    rows = []
    for name, part in texts.items():
        found = list(zip(chosen.items(), mixtures, stores.meet(part), strict=True))
        for n_prompt in prompts:
            user = f"{name} after {n_prompt}" if n_prompt else name
            alone = _scored(part.p, part, n_prompt)
            rows.append(Row(user, "pure", len(history), 0, None, alone))
            for (method, some), mixture, met in found:
                p = probability(mixture, met, part, has_trust=settings.has_trust, n_prompt=n_prompt)
                surprise = _scored(p, part, n_prompt)
                rows.append(Row(user, method, len(history), len(some.rows), mixture, surprise))
    return rows


def history_of(keys: UserKeys, settings: ScoringSettings) -> tuple[Pairs, Part]:
    """Return the history for datastores, and the last conversations, to fit settings on."""
    held = keys.train.conv >= (1 - _HELD_SHARE) * (keys.train.conv[-1] + 1)
    history = as_pairs(keys.train.rows(~held), settings.kind)
    return history, first(keys.train.rows(held), settings.n_held)


class _Stores:
    """Datastores made from the same history, searched together."""

    def __init__(
        self, history: Pairs, chosen: Mapping[str, Chosen], settings: ScoringSettings
    ) -> None:
        self._history, self._chosen, self._settings = history, chosen, settings

    def meet(self, part: Part) -> list[HeldOut]:
        """Return the neighbors of ``part``'s targets in each datastore."""
        subsets = [some.rows for some in self._chosen.values()]
        found = search(
            _keys(part, self._settings.kind), self._history.keys, subsets, self._settings.k
        )
        each = zip(found, self._chosen.values(), strict=True)
        return [_met(part, some, self._history, chosen) for some, chosen in each]


def as_pairs(part: Part, kind: Kind) -> Pairs:
    """Return the pairs in the plugin's form, with keys of ``kind``."""
    return Pairs(_keys(part, kind), part.values, part.p, part.max)


def first(part: Part, n: int) -> Part:
    """Return the fewest first conversations that have at least ``n`` targets together.

    If the part has fewer targets, return all of it.
    """
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


def probability(
    mixture: Mixture, met: HeldOut, part: Part, *, has_trust: bool, n_prompt: int = 0
) -> NDArray[np.float32]:
    """Return the mixed probability of each target, shape ``(n,)``.

    Earlier targets of a conversation set how much later ones trust the datastore.

    Args:
        mixture: The fitted mixture.
        met: Neighbors of the targets.
        part: The targets.
        has_trust: Whether trust is used; otherwise it is 1 throughout.
        n_prompt: If not 0, the conversation's first ``n_prompt`` tokens are a prompt. Its last
            tokens, as many as the plugin looks back on, then set one trust for all targets.
    """
    columns = met.distances, met.hits, met.weights, met.p_lm, met.p_max
    p = mixture.probability(*columns)
    if not has_trust:
        return p
    starts = np.flatnonzero(np.diff(part.conv, prepend=-1))
    texts = zip(np.split(p, starts[1:]), np.split(met.p_lm, starts[1:]), strict=True)
    trust = np.concatenate([_trust(mixed, alone, n_prompt) for mixed, alone in texts])
    return mixture.probability(*columns, trust)


def _trust(
    mixed: NDArray[np.float32], alone: NDArray[np.float32], n_prompt: int
) -> NDArray[np.float32]:
    if n_prompt == 0:
        return trust_before(mixed, alone)
    seen = slice(max(0, n_prompt - _LOOK_BACK), n_prompt)
    after = trust_before(np.append(mixed[seen], 1), np.append(alone[seen], 1))[-1]
    return np.full_like(mixed, after)


def _scored(p: NDArray[np.float32], part: Part, n_prompt: int) -> Surprise:
    is_reply = _places(part.conv) >= n_prompt
    return Surprise.of(p[is_reply], part.conv[is_reply])


def _places(conv: NDArray[np.int32]) -> NDArray[np.intp]:
    """Return the position of each pair within its conversation."""
    starts = np.flatnonzero(np.diff(conv, prepend=-1))
    return np.arange(len(conv)) - np.repeat(starts, np.diff(starts, append=len(conv)))
