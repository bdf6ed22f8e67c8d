"""What a trace is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Call", "Trace"]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the model.

    Attributes:
        time_s: When, in seconds from the trace's beginning.
        context: Which of the contexts, from 0.
        family: Kind of task.
        n_prompt: New tokens that the caller sends.
        n_reply: Tokens of the reply; the context grows by both.
        prompt: The new text, where data sets were given.
        truth: The right answer to it, likewise.
    """

    time_s: float
    context: int
    family: str
    n_prompt: int
    n_reply: int
    prompt: str | None = None
    truth: str | None = None

    @property
    def n_delta(self) -> int:
        """Tokens the context grows by."""
        return self.n_prompt + self.n_reply


@dataclass(frozen=True, slots=True)
class Trace:
    """Calls in order of time, and what they were made with.

    Attributes:
        settings: All that decides the calls.
        calls: The calls.
    """

    settings: Mapping[str, Any]
    calls: Sequence[Call]
