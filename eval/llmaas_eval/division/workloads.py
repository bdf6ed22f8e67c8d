"""Work that needs memory for contexts, for weights, or for both in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

__all__ = ["WORKLOADS", "Turn"]


class Turn(NamedTuple):
    """Request that continues a context.

    Attributes:
        context: Number of the context.
        n_prompt: Tokens that are added to the context.
        n_answer: Tokens of the answer.
    """

    context: int
    n_prompt: int
    n_answer: int


def _chat_heavy(rng: np.random.Generator, n_contexts: int, n_turns: int) -> list[Turn]:
    """Return chats in three of the contexts, which change after a few turns."""
    favorites = rng.choice(n_contexts, 3, replace=False)
    chosen = np.repeat(rng.choice(favorites, -(-n_turns // 4)), 4)[:n_turns]
    return [Turn(int(context), 24, 8) for context in chosen]


def _switch_heavy(rng: np.random.Generator, n_contexts: int, n_turns: int) -> list[Turn]:
    """Return short requests, each in another context."""
    order = np.concatenate([rng.permutation(n_contexts) for _ in range(-(-n_turns // n_contexts))])
    return [Turn(int(context), 8, 1) for context in order[:n_turns]]


def _long_answers(rng: np.random.Generator, n_contexts: int, n_turns: int) -> list[Turn]:
    """Return long answers in one context."""
    context = int(rng.integers(n_contexts))
    return [Turn(context, 16, 64) for _ in range(max(1, n_turns // 8))]


def _mixed(rng: np.random.Generator, n_contexts: int, n_turns: int) -> list[Turn]:
    """Return all three, one after the other."""
    n = n_turns // 2
    return [
        *_chat_heavy(rng, n_contexts, n),
        *_switch_heavy(rng, n_contexts, n),
        *_long_answers(rng, n_contexts, n),
    ]


WORKLOADS: Mapping[str, Callable[[np.random.Generator, int, int], list[Turn]]] = {
    "chat-heavy": _chat_heavy,
    "switch-heavy": _switch_heavy,
    "long answers": _long_answers,
    "mixed": _mixed,
}
"""Functions that make the turns, from a generator, the contexts, and the turns of a workload."""
