"""Measure the answers to many prompts, group by group, so that a stopped command continues."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import Tokens
from llmaas_plugins.deadlines.answering import Comparison, Sequences, answers_to
from llmaas_plugins.deadlines.answers import Answers

__all__ = ["Kept", "cut_prompts", "estimated_s", "measured"]

_LENGTHS = (16, 32, 64, 128)
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
    lengths: Sequence[int] = _LENGTHS,
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
    prompts: Sequence[Tokens],
    comparison: Comparison,
    kept: Kept,
    progress: Callable[[int], object],
) -> Answers:
    """Compare the answers of all pairs of levels to prompts.

    Args:
        model: A loaded ``llama_model`` with levels.
        prompts: Tokens of each prompt; one or more.
        comparison: Answers and levels to compare.
        kept: Place of the groups that are complete.
        progress: Function that is told of each number of prompts that are done.
    """
    order = np.argsort([len(prompt) for prompt in prompts], kind="stable")
    found = []
    with Sequences(model, max(map(len, prompts)) + comparison.n_answer) as sequences:
        for name, group in _groups(order, sequences.n_together):
            answers = _of_kept(kept, name, comparison, len(group))
            if answers is None:
                answers = answers_to(sequences, [prompts[i] for i in group], comparison)
                kept.keep({f"{name} {key}": array for key, array in _arrays(answers).items()})
            found.append(answers)
            progress(len(group))
    places = np.argsort(order)
    arrays = {key: np.concatenate([_arrays(one)[key] for one in found])[places] for key in _KEYS}
    return Answers(tuple(comparison.levels), comparison.n_answer, **arrays).check()


def estimated_s(model: Any, prompts: Sequence[Tokens], comparison: Comparison) -> float:
    """Return about how many seconds a prompt will take, from a probe of the whole model."""
    tokens = np.zeros(_N_PROBED, np.int32)
    with Sequences(model, _N_PROBED) as sequences:
        times = []
        for _ in range(2):
            started = time.perf_counter()
            sequences.keep(0, 0)
            sequences.evaluate([(0, 0, tokens)], is_last_only=True)
            times.append(time.perf_counter() - started)
    n_prompt = float(np.mean([len(prompt) for prompt in prompts]))
    levels, n_others = comparison.levels, comparison.n_answer - 1
    n_read = sum(levels) * (n_prompt + len(levels) * n_others)
    return min(times) / _N_PROBED * n_read


# -- inside --------------------------------------------------------------------------------------

_N_PROBED = 64
_KEYS = ("n_prompt", "leads", "margins")


def _groups(order: NDArray[np.intp], n: int) -> Iterator[tuple[str, NDArray[np.intp]]]:
    """Yield names and indices of ``n`` prompts of similar lengths each."""
    for begin in range(0, len(order), n):
        yield f"group {begin}", order[begin : begin + n]


def _arrays(answers: Answers) -> dict[str, Any]:
    return {key: getattr(answers, key) for key in _KEYS}


def _of_kept(kept: Kept, name: str, comparison: Comparison, n: int) -> Answers | None:
    """Return a group's answers if an earlier run kept them."""
    arrays: dict[str, Any] = {key: kept.get(f"{name} {key}") for key in _KEYS}
    if any(array is None for array in arrays.values()):
        return None
    try:
        found = Answers(tuple(comparison.levels), comparison.n_answer, **arrays).check()
    except (ValueError, AttributeError):
        return None
    return found if len(found) == n else None
