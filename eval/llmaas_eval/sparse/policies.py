"""Cache policies for channels, simulated: a policy scores channels, and the best ones stay.

A policy gives every channel a score after each token. The cache then holds the best of the channels
that it held and of those that were just read. A channel that is worse than all of these is used and
dropped. Scores depend neither on the cache nor on its size. Belady's score is the time of the next
use.
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
    """Active channels of one family, token by token.

    Attributes:
        active: Whether a channel is multiplied, ``(n_contexts, n_tokens, n_layers, n_channels)``.
        n_prompt: Number of each context's first tokens that are read densely, past the cache.
        busy: How often a channel was active on the calibration text, ``(n_layers, n_channels)``.
    """

    active: Flags
    n_prompt: int
    busy: NDArray[np.float64]

    @property
    def decoded(self) -> Flags:
        """Flags of the decoded tokens, shape ``(n_contexts * n_decoded, n_layers, n_channels)``."""
        return self.active[:, self.n_prompt :].reshape(-1, *self.active.shape[2:])

    def pooled(self) -> Trace:
        """Return the trace with all layers as one, so that their channels share a cache."""
        shape = (*self.active.shape[:2], 1, -1)
        return Trace(self.active.reshape(shape), self.n_prompt, self.busy.reshape(1, -1))


Policy = Callable[[Trace], Scores]
"""Scores after each decoded token, shaped like ``Trace.decoded``."""


class Misses(NamedTuple):
    """Channels that were read, shaped like ``Trace.decoded``.

    Attributes:
        preloaded: Channels that were predicted and not in memory.
        demanded: Channels that were active, but neither in memory nor predicted.
    """

    preloaded: Flags
    demanded: Flags


def simulate(trace: Trace, scores: Scores, capacity: int, predicted: Flags | None = None) -> Misses:
    """Simulate a cache of ``capacity`` channels a layer on the decoded tokens.

    The cache begins with the channels that are busiest on the calibration text.

    Args:
        trace: Active channels.
        scores: Scores of a policy.
        capacity: Number of channels that each layer caches.
        predicted: Channels that are read ahead if they are not in memory; None predicts nothing.
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
    """Return the share of active channels that are in memory when they are used."""
    missed = simulate(trace, scores, capacity).demanded
    return 1 - float(missed.sum() / trace.decoded.sum())


def _best(scores: NDArray[np.floating], n: int) -> Flags:
    found = np.zeros(scores.shape, np.bool_)
    if n:
        best = np.argpartition(scores, -n, axis=-1)[..., -n:]
        np.put_along_axis(found, best, True, axis=-1)
    return found


def _decoded(trace: Trace, scores: NDArray[np.floating]) -> Scores:
    """Return the decoded tokens' scores, given those of every token."""
    found = scores.reshape(trace.active.shape)[:, trace.n_prompt :]
    return found.reshape(trace.decoded.shape).astype(np.float32)


def _recency(trace: Trace) -> NDArray[np.float32]:
    """Return each channel's time of last use as a share of the trace, to break ties."""
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
    """Return the LFU policy whose counts are halved every ``n_half`` tokens."""

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
    """Return higher scores for earlier next uses."""
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
"""Policies by their names in tables; the first one is the paper's."""
