"""Promises in milliseconds, and the constant levels that keep them on an idle machine.

A promise is a share of the whole model's time for the whole prompt, without reuse. That time is the
profile's, times a factor that 95 % of single requests to an idle service stay below. So the whole
model keeps 100 % there, and all systems are judged by the same milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from llmaas_eval.deadlines.loaded.load import Limits
from llmaas_eval.deadlines.loaded.traces import Shares
from llmaas_plugins.elastic.latency import Latency

__all__ = ["Idle", "Size", "Times", "constant_levels", "possible_share", "times_of"]

_QUANTILE = 0.95
_ROUNDING = 1e-9


class Size(NamedTuple):
    """Tokens of a prompt: all of a cold one, and those that a warm one evaluates."""

    n_cold: int
    n_warm: int


class Idle(NamedTuple):
    """A single request to an idle service with the whole model.

    Attributes:
        app: Name of the app.
        kind: ``cold`` or ``warm``.
        n_prompt: Tokens that were evaluated.
        ttft_ms: Measured time to the first token.
        tpot_ms: Measured mean time of each further token.
    """

    app: str
    kind: str
    n_prompt: int
    ttft_ms: float
    tpot_ms: float


class Times(NamedTuple):
    """Times that single requests to an idle service rarely exceed.

    Attributes:
        latency: Profile of the model.
        ttft_factor: Factor of the profile's times to the first token.
        tpot_factor: Factor of the profile's times of further tokens.
        restore_ms: Median time that a warm prompt takes beside the tokens that it evaluates.
    """

    latency: Latency
    ttft_factor: float
    tpot_factor: float
    restore_ms: float

    def ttft_ms(self, level: float, size: Size, kind: str) -> float:
        """Return the time to the first token at a level."""
        latency, is_warm = self.latency, kind == "warm"
        n_tokens = size.n_warm if is_warm else size.n_cold
        own_ms = self.ttft_factor * latency.ttft_ms(level, n_tokens, latency.threads[-1])
        return own_ms + (self.restore_ms if is_warm else 0.0)

    def tpot_ms(self, level: float, size: Size) -> float:
        """Return the time of each further token at a level."""
        latency = self.latency
        return self.tpot_factor * latency.tpot_ms(level, size.n_cold, latency.threads[0])

    def limits(self, shares: Shares, size: Size) -> Limits:
        """Return a promise in ms, which does not depend on whether the prompt is warm."""
        whole = self.latency.levels[0]
        return Limits(
            shares.ttft * self.ttft_ms(whole, size, "cold"), shares.tpot * self.tpot_ms(whole, size)
        )


def times_of(latency: Latency, measured: Sequence[Idle]) -> Times:
    """Return the times of a profile, corrected by requests that were measured.

    Raises:
        ValueError: No cold requests were measured.
    """
    whole, most, least = latency.levels[0], latency.threads[-1], latency.threads[0]
    cold = [one for one in measured if one.kind == "cold"]
    if not cold:
        raise ValueError("no cold requests were measured")
    first = [one.ttft_ms / latency.ttft_ms(whole, one.n_prompt, most) for one in cold]
    further = [one.tpot_ms / latency.tpot_ms(whole, one.n_prompt, least) for one in cold]
    factors = [float(np.quantile(ratios, _QUANTILE)) for ratios in (first, further)]
    more = [
        one.ttft_ms - factors[0] * latency.ttft_ms(whole, one.n_prompt, most)
        for one in measured
        if one.kind == "warm"
    ]
    restore_ms = max(0.0, float(np.median(more))) if more else 0.0
    return Times(latency, factors[0], factors[1], restore_ms)


def constant_levels(  # noqa: PLR0913  parts of a choice
    times: Times,
    shares: Shares,
    sizes: Sequence[Size],
    kind: str,
    *,
    is_one: bool = False,
    headroom: float = 1.0,
) -> tuple[float, float]:
    """Return the widest levels of prompt and answer that keep a promise for 95 % of the prompts.

    Where none does, that is the narrowest level.

    Args:
        times: Times on an idle machine.
        shares: Promise.
        sizes: Sizes of the app's prompts.
        kind: Kind of prompts.
        is_one: Whether prompt and answer must have the same level, as in the papers.
        headroom: Share of the promise that the levels may take.
    """
    pairs = [(size, times.limits(shares, size)) for size in sizes]

    def first(level: float) -> bool:
        return _mostly(
            [
                _fits(times.ttft_ms(level, size, kind), headroom * most.ttft_ms)
                for size, most in pairs
            ]
        )

    def further(level: float) -> bool:
        return _mostly(
            [_fits(times.tpot_ms(level, size), headroom * most.tpot_ms) for size, most in pairs]
        )

    levels = times.latency.levels
    if is_one:
        both = _widest(levels, lambda level: first(level) and further(level))
        return both, both
    return _widest(levels, first), _widest(levels, further)


def possible_share(  # noqa: PLR0913, PLR0917  parts of a trace
    times: Times,
    promises: Mapping[str, Shares],
    levels: Mapping[str, tuple[float, float]],
    sizes: Sequence[tuple[str, Size]],
    kind: str,
    read: float = 1.0,
) -> float:
    """Return the share of requests that keep both limits on an idle machine.

    Args:
        times: Times on an idle machine.
        promises: Promise of each app.
        levels: Levels of prompt and answer of each app.
        sizes: App and size of each request.
        kind: Kind of prompts.
        read: Share of a cold prompt that is read. Choosing it takes no time here.
    """
    kept = 0
    for app, size in sizes:
        limits, (prefill, decode) = times.limits(promises[app], size), levels[app]
        shorter = size._replace(n_cold=math.ceil(read * size.n_cold))
        first_ms, further_ms = times.ttft_ms(prefill, shorter, kind), times.tpot_ms(decode, size)
        kept += _fits(first_ms, limits.ttft_ms) and _fits(further_ms, limits.tpot_ms)
    return kept / len(sizes)


# -- inside --------------------------------------------------------------------------------------


def _fits(ms: float, most_ms: float) -> bool:
    return ms <= most_ms * (1 + _ROUNDING)


def _mostly(kept: Sequence[bool]) -> bool:
    return sum(kept) >= _QUANTILE * len(kept)


def _widest(levels: Sequence[float], keeps: Callable[[float], bool]) -> float:
    return next((level for level in levels if keeps(level)), levels[-1])
