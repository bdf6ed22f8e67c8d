"""Types of a trace and its calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Trace", "TraceCall"]


@dataclass(frozen=True, slots=True)
class TraceCall:
    """One call of the model.

    Attributes:
        time_s: Time in seconds from the trace's beginning.
        context: Number of the context, from 0.
        family: Kind of task.
        n_prompt: New tokens that the caller sends.
        n_reply: Tokens of the reply; the context grows by both.
        prompt: New text; None without data sets.
        truth: Correct answer to the prompt; None without data sets.
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
        """Tokens by which the context grows."""
        return self.n_prompt + self.n_reply


@dataclass(frozen=True, slots=True)
class Trace:
    """Calls in order of time, and the settings that they were generated with.

    Attributes:
        settings: All settings that determine the calls.
        calls: Calls in order of time.
    """

    settings: Mapping[str, Any]
    calls: Sequence[TraceCall]
