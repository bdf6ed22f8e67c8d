"""Latency that apps ask for, and times that plugins predict for a request (ElastiLM §2.1, Eq 1)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Self

from llmaas_hooks.errors import ConfigError

__all__ = ["NO_PROMISE", "LevelTimes", "Limit", "Promise", "RequestCost", "ShorterPrompt"]

_TEXT = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*(ms|s|%)", re.ASCII)
_UNITS = {"ms": 1e-3, "s": 1.0, "%": 1e-2}
_MOST_S, _MOST_SHARE = 86_400.0, 10.0
_MOST_SHOWN = 80
_MOST_AHEAD, _UNKNOWN_AHEAD = 64, 16
"""Most tokens of an answer to plan with, and the number if no end is known."""
_EXPECTED = "expected a time such as '300 ms', or a share of the whole model's such as '60 %'"


class Limit(NamedTuple):
    """Longest time that is wanted.

    Attributes:
        value: Seconds, or a share of the time that the whole model takes.
        is_share: Whether ``value`` is such a share.
    """

    value: float
    is_share: bool = False

    @classmethod
    def of(cls, value: object) -> Self:
        """Return a limit from a text such as ``300 ms``, ``1.5 s`` or ``60 %``.

        Raises:
            ConfigError: The value is no such text, or is not above zero, or is too large.
        """
        if isinstance(value, cls):
            return value
        found = _TEXT.fullmatch(value.strip()) if isinstance(value, str) else None
        if found is None:
            raise ConfigError(f"{_EXPECTED}, found {repr(value)[:_MOST_SHOWN]}")
        number, is_share = float(found[1]) * _UNITS[found[2]], found[2] == "%"
        most = _MOST_SHARE if is_share else _MOST_S
        if not 0 < number <= most:
            limit = f"{most:.0%}" if is_share else f"{most:.0f} s"
            raise ConfigError(
                f"{_EXPECTED}, above zero and at most {limit}, found {repr(value)[:_MOST_SHOWN]}"
            )
        return cls(number, is_share)

    def seconds(self, whole_s: float) -> float:
        """Return the limit in seconds, if the whole model takes ``whole_s``."""
        return self.value * whole_s if self.is_share else self.value

    def __str__(self) -> str:
        """Return the limit as a text that ``of`` accepts."""
        number = f"{(100 if self.is_share else 1000) * self.value:.10g}"
        return f"{number} {'%' if self.is_share else 'ms'}"


@dataclass(frozen=True, slots=True)
class Promise:
    """Latency that an app asks for. None promises nothing.

    Attributes:
        ttft: Longest time from the call to the first token.
        tpot: Longest mean time of each further token.
        waited_s: Seconds for which the request waited before it began; they count as time to the
            first token.
        room_s: Seconds within which the first token should come, so that requests that wait behind
            keep their promises; None if none waits.
        pressure: Share of both limits to leave for other requests, from 0 to below 1.
        n_most: Most tokens of the answer; None if there is no limit.
    """

    ttft: Limit | None = None
    tpot: Limit | None = None
    waited_s: float = 0.0
    room_s: float | None = None
    pressure: float = 0.0
    n_most: int | None = None

    def __bool__(self) -> bool:
        """Return whether any limit is promised."""
        return self.ttft is not None or self.tpot is not None

    def over(self, other: Promise) -> Promise:
        """Return this promise, with each None replaced by the limit of ``other``."""
        return Promise(
            self.ttft or other.ttft,
            self.tpot or other.tpot,
            self.waited_s + other.waited_s,
            other.room_s if self.room_s is None else self.room_s,
            max(self.pressure, other.pressure),
            other.n_most if self.n_most is None else self.n_most,
        )

    def n_ahead(self, n_generated: int) -> int:
        """Return the number of the answer's tokens to plan with, after ``n_generated``."""
        n_left = _UNKNOWN_AHEAD if self.n_most is None else self.n_most - n_generated
        return min(max(n_left, 0), _MOST_AHEAD)


NO_PROMISE = Promise()


class LevelTimes(NamedTuple):
    """Times that one level of an elastic model was measured to take.

    Attributes:
        level: Share of the blocks' weights.
        ttft_s: Function from the number of prompt tokens to evaluate to the seconds until the first
            token.
        tpot_s: Function from the number of tokens before it to the seconds of a further token.
    """

    level: float
    ttft_s: Callable[[int], float]
    tpot_s: Callable[[int], float]


class ShorterPrompt(NamedTuple):
    """A prompt of which a request could read a part.

    Attributes:
        share: Share of the prompt's tokens that is asked for.
        n_tokens: Number of tokens that would be left.
        seconds: Seconds that it takes to choose them; None if it takes the model's narrowest level
            for the whole prompt, about, and was not measured.
    """

    share: float
    n_tokens: int
    seconds: float | None


class RequestCost(NamedTuple):
    """Times that a plugin predicts for a request that has not begun.

    Attributes:
        n_ready: Number of leading prompt tokens that need no evaluation.
        ready_s: Seconds until these tokens are ready.
        levels: Times of each level, widest first; empty if the plugin measured none.
        levels_id: Name of what the levels compute: the same only for the same model, widths and
            adapters. None if it is unknown.
        shorter: Prompts that the request could read instead, longest first; empty if its prompt
            must stay whole.
        shorter_by: Name of how their words are chosen; None if there are none.
    """

    n_ready: int = 0
    ready_s: float = 0.0
    levels: tuple[LevelTimes, ...] = ()
    levels_id: str | None = None
    shorter: tuple[ShorterPrompt, ...] = ()
    shorter_by: str | None = None

    def plus(self, other: RequestCost) -> RequestCost:
        """Return the cost of two plugins together."""
        return RequestCost(
            max(self.n_ready, other.n_ready),
            self.ready_s + other.ready_s,
            self.levels or other.levels,
            self.levels_id or other.levels_id,
            self.shorter or other.shorter,
            self.shorter_by if self.shorter else other.shorter_by,
        )
