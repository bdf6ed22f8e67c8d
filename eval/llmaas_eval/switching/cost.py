"""Cost of evaluating tokens on this machine: measured at a few lengths, then checked on others."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from llmaas_eval.switching.engine import SequenceEngine
from llmaas_eval.switching.systems.base import app_cells
from llmaas_plugins.kv_chunks.transfer.cost_profile import non_negative_least_squares

__all__ = ["Cost", "measure_cost"]

_N_CHECKS = 10
_N_REPLY = 16


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds that evaluation takes.

    Attributes:
        call_s: Seconds for each call.
        token_s: Seconds for each token of a prompt.
        pair_s: Seconds for each pair of a prompt's token and a token before it.
        reply_s: Seconds for each token of a reply.
        errors: Relative errors of predictions for real evaluations: predicted over real time, minus
            1.
    """

    call_s: float
    token_s: float
    pair_s: float
    reply_s: float
    errors: tuple[float, ...]

    def prompt_s(self, start: int, n_tokens: int) -> float:
        """Return the seconds for ``n_tokens`` tokens after ``start`` others."""
        if n_tokens == 0:
            return 0.0
        return float(_terms(start, n_tokens) @ (self.call_s, self.token_s, self.pair_s))


def measure_cost(model: Path, max_tokens: int) -> Cost:
    """Measure the cost for contexts of up to ``max_tokens`` tokens."""
    engine = SequenceEngine(model, app_cells(max_tokens), 1)
    try:
        engine.decode(min(512, max_tokens))  # the first batch of that size is slower
        quarter = max_tokens // 4
        lengths = [(0, quarter // 2), (0, quarter), (0, 2 * quarter), (0, 4 * quarter)]
        lengths += [(2 * quarter, quarter // 2), (2 * quarter, quarter)]
        seconds = np.array([_measure(engine, *length) for length in lengths])
        terms = np.array([_terms(*length) for length in lengths])
        found = non_negative_least_squares(terms / seconds[:, None], np.ones(len(lengths)))
        call_s, token_s, pair_s = found.tolist()
        cost = Cost(call_s, token_s, pair_s, _measure_reply(engine), errors=())
        return replace(cost, errors=_check(engine, cost, max_tokens))
    finally:
        engine.close()


def _terms(start: int, n_tokens: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([1.0, n_tokens, n_tokens * (start + n_tokens / 2)])


def _measure(engine: SequenceEngine, start: int, n_tokens: int) -> float:
    engine.remove(0)
    if start:
        engine.decode(start)
    started = time.perf_counter()
    engine.decode(n_tokens)
    return time.perf_counter() - started


def _measure_reply(engine: SequenceEngine) -> float:
    engine.remove(0)
    engine.decode(_N_REPLY)
    started = time.perf_counter()
    for _ in range(_N_REPLY):
        engine.decode(1)
    return (time.perf_counter() - started) / _N_REPLY


def _check(engine: SequenceEngine, cost: Cost, max_tokens: int) -> tuple[float, ...]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(max_tokens // 16, max_tokens, _N_CHECKS).tolist()
    return tuple(cost.prompt_s(0, n) / _measure(engine, 0, n) - 1 for n in lengths)
