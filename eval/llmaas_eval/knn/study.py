"""What a history is worth to a user: a datastore by each method, fitted alike, scored alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.knn.intervals import Surprise
from llmaas_eval.knn.keys import Part, UserKeys
from llmaas_eval.knn.neighbours import Found, search
from llmaas_plugins.knn_lm.config import KnnLMConfig
from llmaas_plugins.knn_lm.fitting import HeldOut, fit
from llmaas_plugins.knn_lm.mixing import Mixture
from llmaas_plugins.knn_lm.pairs import Pairs
from llmaas_plugins.knn_lm.trust import trust_before

__all__ = [
    "Chosen",
    "Kind",
    "Method",
    "Plan",
    "Row",
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
class Plan:
    """How a user is studied.

    Attributes:
        n_test: Targets that are scored, about: whole conversations.
        n_held: Targets of the training part's last tenth that settings are fitted on, likewise.
        k: Neighbours.
        kind: Which hidden states are keys.
        has_far: Whether the mixture may leave to the model what is like nothing stored.
        has_trust: Whether the mixture counts less where it did no good before.
    """

    n_test: int
    n_held: int
    k: int = 100
    kind: Kind = "ffn"
    has_far: bool = True
    has_trust: bool = True


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
    methods: Mapping[str, tuple[Method, float]],
    plan: Plan,
    *,
    others: Mapping[str, Part] | None = None,
    prompts: Sequence[int] = (0,),
) -> list[Row]:
    """The model alone, then each of ``methods`` with its share of the history's pairs.

    Args:
        keys: Of a user: what datastores are made from, and what is scored.
        methods: By name.
        plan: How.
        others: More text to score, by name; a row's user is "<user> on <name>" then.
        prompts: Tokens of each text that are a prompt, see ``probability``: the rest is scored,
            and a row's user ends in "after <n>".
    """
    history, fitted_on = history_of(keys, plan)
    chosen = {
        name: method(history, round(share * len(history)))
        for name, (method, share) in methods.items()
    }
    stores = _Stores(history, chosen, plan)
    mixtures = [fit(met, has_far=plan.has_far).mixture for met in stores.meet(fitted_on)]
    texts = {keys.name: first(keys.test, plan.n_test)}
    texts |= {f"{keys.name} on {name}": part for name, part in (others or {}).items()}
    rows = []
    for name, part in texts.items():
        found = list(zip(chosen.items(), mixtures, stores.meet(part), strict=True))
        for n_prompt in prompts:
            user = f"{name} after {n_prompt}" if n_prompt else name
            alone = _scored(part.p, part, n_prompt)
            rows.append(Row(user, "pure", len(history), 0, None, alone))
            for (method, some), mixture, met in found:
                p = probability(mixture, met, part, has_trust=plan.has_trust, n_prompt=n_prompt)
                surprise = _scored(p, part, n_prompt)
                rows.append(Row(user, method, len(history), len(some.rows), mixture, surprise))
    return rows


def history_of(keys: UserKeys, plan: Plan) -> tuple[Pairs, Part]:
    """What datastores are made from, and the last conversations that settings are fitted on."""
    held = keys.train.conv >= (1 - _HELD_SHARE) * (keys.train.conv[-1] + 1)
    history = as_pairs(keys.train.rows(~held), plan.kind)
    return history, first(keys.train.rows(held), plan.n_held)


class _Stores:
    """Datastores made from the same history, all searched at once."""

    def __init__(self, history: Pairs, chosen: Mapping[str, Chosen], plan: Plan) -> None:
        self._history, self._chosen, self._plan = history, chosen, plan

    def meet(self, part: Part) -> list[HeldOut]:
        """What targets find in each."""
        subsets = [some.rows for some in self._chosen.values()]
        found = search(_keys(part, self._plan.kind), self._history.keys, subsets, self._plan.k)
        each = zip(found, self._chosen.values(), strict=True)
        return [_met(part, some, self._history, chosen) for some, chosen in each]


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


def probability(
    mixture: Mixture, met: HeldOut, part: Part, *, has_trust: bool, n_prompt: int = 0
) -> NDArray[np.float32]:
    """Of each target; what came before it in its conversation decides how far to trust.

    Args:
        mixture: As it was fitted.
        met: Neighbours of the targets.
        part: Which they are.
        has_trust: Whether that is so, or trust is 1.
        n_prompt: If not 0, a conversation's first tokens decide for all: those that the plugin
            looks back on, of a prompt of so many.
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
    """Of each pair, in its conversation."""
    starts = np.flatnonzero(np.diff(conv, prepend=-1))
    return np.arange(len(conv)) - np.repeat(starts, np.diff(starts, append=len(conv)))
