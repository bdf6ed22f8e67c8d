"""Measure the answers to many prompts, group by group, so that a stopped command continues."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import Tokens
from llmaas_plugins.deadlines.answering import Comparison, Prompts, Sequences, answers_to
from llmaas_plugins.deadlines.answers import Answers, Shorter

__all__ = ["LENGTHS", "Kept", "affordable", "cut_prompts", "measured"]

LENGTHS: tuple[int, ...] = (16, 32, 64, 128)
"""Numbers of tokens of prompts."""
_LEAST_STEP = 8
"""Fewest tokens between the ends of two prompts."""


class Kept(Protocol):
    """Results by name that an earlier run may have kept."""

    def get(self, name: str) -> NDArray[Any] | None:
        """Return a result, or None if it is not known."""

    def keep(self, results: Mapping[str, NDArray[Any]]) -> None:
        """Keep results together."""


def cut_prompts(
    texts: Sequence[Tokens],
    n_prompts: int,
    start: Sequence[int] = (),
    lengths: Sequence[int] = LENGTHS,
) -> list[Tokens]:
    """Cut prompts of several lengths from texts, in random order.

    Prompts that would overlap are cut only from a text that is too short for others.

    Args:
        texts: Tokens of each text.
        n_prompts: Most prompts of all texts together, the same number of each.
        start: Tokens that a prompt begins with.
        lengths: Numbers of tokens of a prompt, without ``start``.
    """
    chance = np.random.default_rng(0)
    n_each, found = -(-n_prompts // max(len(texts), 1)), list[Tokens]()
    for text in texts:
        step = max(len(text) // max(n_each, 1), _LEAST_STEP)
        for number, end in enumerate(range(min(lengths), len(text) + 1, step)):
            length = min(lengths[number % len(lengths)], end)
            part = text[end - length : end]
            if number < n_each:
                found.append(np.concatenate([np.array(start, np.int32), part]).astype(np.int32))
    return [found[i] for i in chance.permutation(len(found))[:n_prompts]]


def measured(
    model: Any,
    prompts: Prompts,
    comparison: Comparison,
    kept: Kept,
    progress: Callable[[int], object],
) -> Answers:
    """Compare the answers of all settings to prompts.

    Args:
        model: A loaded ``llama_model`` with levels.
        prompts: The prompts; one or more.
        comparison: Answers and settings to compare.
        kept: Place of the groups that are complete.
        progress: Function that is told of each number of prompts that are done.
    """
    n_prompt = [len(prompt) for prompt in prompts.whole]
    order, found = np.argsort(n_prompt, kind="stable"), []
    with Sequences(model, max(n_prompt) + comparison.n_answer) as sequences:
        for name, group in _groups(order, sequences.n_together):
            answers = _of_kept(kept, name, comparison, len(group))
            if answers is None:
                answers = answers_to(sequences, prompts.some(group), comparison)
                kept.keep({f"{name} {key}": array for key, array in _arrays(answers).items()})
            found.append(answers)
            progress(len(group))
    places = np.argsort(order)
    arrays = [_arrays(one) for one in found]
    together = {key: np.concatenate([one[key] for one in arrays])[places] for key in arrays[0]}
    return _answers(comparison, together)


def affordable(
    model: Any, prompts: Sequence[Tokens], comparison: Comparison, most_s: float
) -> tuple[Comparison, float]:
    """Return the comparison, and about how many seconds a prompt takes, from a probe of the model.

    If all prompts would take too long, shorter prompts are read at every second level only, the
    narrowest one included, or at every second of these, down to two.

    Args:
        model: A loaded ``llama_model``.
        prompts: Tokens of each prompt.
        comparison: Answers and settings to compare.
        most_s: Most seconds for all prompts.
    """
    token_s = _token_s(model)
    while True:
        each_s = token_s * _n_read(prompts, comparison)
        some = comparison.levels_of_shares
        if len(prompts) * each_s <= most_s or len(some) <= _LEAST_LEVELS:
            return comparison, each_s
        comparison = comparison._replace(levels_of_shares=(*some[:-1:2], some[-1]))


# -- inside --------------------------------------------------------------------------------------

_N_PROBED = 64
_LEAST_LEVELS = 2
_KEYS = ("n_prompt", "leads", "margins")
_SHORTER = "shorter"


def _token_s(model: Any) -> float:
    """Return the seconds that the whole model takes for a token of a prompt."""
    tokens = np.zeros(_N_PROBED, np.int32)
    with Sequences(model, _N_PROBED) as sequences:
        times = []
        for _ in range(2):
            started = time.perf_counter()
            sequences.keep(0, 0)
            sequences.evaluate([(0, 0, tokens)], is_last_only=True)
            times.append(time.perf_counter() - started)
    return min(times) / _N_PROBED


def _n_read(prompts: Sequence[Tokens], comparison: Comparison) -> float:
    """Return how many tokens the whole model could read while a prompt is compared."""
    n_prompt = float(np.mean([len(prompt) for prompt in prompts]))
    settings = [(1.0, comparison.levels)]
    settings += [(share, comparison.levels_of_shares) for share in comparison.shares]
    return sum(
        sum(levels) * (share * n_prompt + len(levels) * (comparison.n_answer - 1))
        for share, levels in settings
    )


def _groups(order: NDArray[np.intp], n: int) -> Iterator[tuple[str, NDArray[np.intp]]]:
    """Yield names and indices of ``n`` prompts of similar lengths each."""
    for begin in range(0, len(order), n):
        yield f"group {begin}", order[begin : begin + n]


def _arrays(answers: Answers) -> dict[str, NDArray[Any]]:
    found: dict[str, NDArray[Any]] = {key: getattr(answers, key) for key in _KEYS}
    return found if answers.shorter is None else found | {_SHORTER: answers.shorter.leads}


def _answers(comparison: Comparison, arrays: dict[str, Any]) -> Answers:
    """Return the answers with these arrays.

    Raises:
        ValueError: They are impossible.
    """
    n_answer, levels, _, shares, levels_of_shares = comparison
    leads = arrays.pop(_SHORTER, None)
    shorter = None if leads is None else Shorter(tuple(shares), tuple(levels_of_shares), leads)
    return Answers(tuple(levels), n_answer, **arrays, shorter=shorter).check()


def _of_kept(kept: Kept, name: str, comparison: Comparison, n: int) -> Answers | None:
    """Return a group's answers if an earlier run kept them."""
    keys = (*_KEYS, _SHORTER) if comparison.shares else _KEYS
    arrays: dict[str, Any] = {key: kept.get(f"{name} {key}") for key in keys}
    if any(array is None for array in arrays.values()):
        return None
    try:
        found = _answers(comparison, arrays)
    except (ValueError, AttributeError):
        return None
    return found if len(found) == n else None
