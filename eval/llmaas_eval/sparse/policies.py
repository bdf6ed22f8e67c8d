"""Which channels stay in memory: policies by the score of what they keep, simulated.

A policy gives every channel a score after each token. The cache then holds the best of the
channels that it held and of those that were just read: what is worse than all of them is used
and dropped. Scores depend neither on the cache nor on its size, and Belady's is the next use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["POLICIES", "Flags", "Misses", "Policy", "Scores", "Trace", "hit_rate", "simulate"]

Flags = NDArray[np.bool_]
Scores = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Trace:
    """Channels of one family that tokens are multiplied with.

    Attributes:
        active: Shape ``(n_contexts, n_tokens, n_layers, n_channels)``.
        n_prompt: Tokens of each context that are read densely, past the cache.
        busy: How busy a channel was on the calibration text, ``(n_layers, n_channels)``.
    """

    active: Flags
    n_prompt: int
    busy: NDArray[np.float64]

    @property
    def decoded(self) -> Flags:
        """Of the tokens that were decoded, ``(n_contexts * n_decoded, n_layers, n_channels)``."""
        return self.active[:, self.n_prompt :].reshape(-1, *self.active.shape[2:])

    def pooled(self) -> Trace:
        """All layers as one, whose channels share a cache."""
        shape = (*self.active.shape[:2], 1, -1)
        return Trace(self.active.reshape(shape), self.n_prompt, self.busy.reshape(1, -1))


Policy = Callable[[Trace], Scores]
"""Scores after each decoded token, shaped like ``Trace.decoded``."""


class Misses(NamedTuple):
    """Channels that were read, shaped like ``Trace.decoded``.

    Attributes:
        preloaded: Predicted, and not in memory.
        demanded: Active, and neither in memory nor predicted.
    """

    preloaded: Flags
    demanded: Flags


def simulate(trace: Trace, scores: Scores, capacity: int, predicted: Flags | None = None) -> Misses:
    """Run a cache of ``capacity`` channels a layer over the decoded tokens.

    It begins with the channels that are busiest on the calibration text.

    Args:
        trace: What is used.
        scores: A policy's.
        capacity: Channels of each layer.
        predicted: Channels that are read ahead if they are not in memory; default none.
    """
    active = trace.decoded
    preloaded, demanded = np.zeros_like(active), np.zeros_like(active)
    cached = _best(trace.busy, capacity)
    for i, used in enumerate(active):
        if predicted is None:
            known = cached
        else:
            known = cached | predicted[i]
            preloaded[i] = predicted[i] & ~cached
        demanded[i] = used & ~known
        cached = _best(np.where(known | used, scores[i], -np.inf), capacity)
    return Misses(preloaded, demanded)


def hit_rate(trace: Trace, scores: Scores, capacity: int) -> float:
    """Share of the active channels that are in memory when they are used."""
    missed = simulate(trace, scores, capacity).demanded
    return 1 - float(missed.sum() / trace.decoded.sum())


def _best(scores: NDArray[np.floating], n: int) -> Flags:
    found = np.zeros(scores.shape, np.bool_)
    if n:
        best = np.argpartition(scores, -n, axis=-1)[..., -n:]
        np.put_along_axis(found, best, True, axis=-1)
    return found


def _decoded(trace: Trace, scores: NDArray[np.floating]) -> Scores:
    """Of every token to those of decoded ones."""
    found = scores.reshape(trace.active.shape)[:, trace.n_prompt :]
    return found.reshape(trace.decoded.shape).astype(np.float32)


def _recency(trace: Trace) -> NDArray[np.float32]:
    """When each channel was used last, as a share of the trace: breaks ties."""
    active = trace.decoded
    time = np.arange(1, len(active) + 1, dtype=np.float32)[:, None, None]
    last = np.maximum.accumulate(np.where(active, time, np.float32(0)), axis=0)
    return (last / (len(active) + 1)).astype(np.float32)


def _lfu_context(trace: Trace) -> Scores:
    counts = np.cumsum(trace.active[:, trace.n_prompt :], axis=1, dtype=np.float32)
    return counts.reshape(trace.decoded.shape) + _recency(trace)


def _lfu_context_and_prompt(trace: Trace) -> Scores:
    counts = np.cumsum(trace.active, axis=1, dtype=np.float32)
    return _decoded(trace, counts) + _recency(trace)


def _lfu_task(trace: Trace) -> Scores:
    return np.cumsum(trace.decoded, axis=0, dtype=np.float32) + _recency(trace)


def _aged(n_half: int) -> Policy:
    """Least frequently used, by counts that are halved every ``n_half`` tokens."""

    def scores(trace: Trace) -> Scores:
        found, counts = _recency(trace), np.zeros_like(trace.busy, np.float32)
        for i, used in enumerate(trace.decoded):
            counts = (counts / 2 if i % n_half == 0 else counts) + used
            found[i] += counts
        return found

    return scores


def _static(trace: Trace) -> Scores:
    return np.broadcast_to(trace.busy.astype(np.float32), trace.decoded.shape)


def _belady(trace: Trace) -> Scores:
    """Earlier next uses score more."""
    active, never = trace.decoded, np.float32(len(trace.decoded))
    time = np.arange(len(active), dtype=np.float32)[:, None, None]
    uses = np.where(active, time, never)[1:]
    last = np.full((1, *active.shape[1:]), never)
    return -np.concatenate([np.minimum.accumulate(uses[::-1], axis=0)[::-1], last])


POLICIES: Mapping[str, Policy] = {
    "LFU, context": _lfu_context,
    "LFU, context and prompt": _lfu_context_and_prompt,
    "LFU, task": _lfu_task,
    "LFU, halved every 8": _aged(8),
    "LFU, halved every 32": _aged(32),
    "LFU, halved every 128": _aged(128),
    "LRU": _recency,
    "static": _static,
    "Belady": _belady,
}
"""By the name of tables; the first is the paper's."""
