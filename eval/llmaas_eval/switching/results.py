"""Results of a replay, as plain JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

__all__ = ["CallResult", "RunResult"]


@dataclass(frozen=True, slots=True)
class CallResult:
    """One call.

    Attributes:
        context: Number of the context that was called.
        is_switch: Whether the call before was of another context.
        slides: Whether the context's window slid, because the call did not fit.
        n_before: Number of tokens that the context had before.
        n_new: Number of tokens that the call added.
        n_resident: Tokens of ``n_before`` that were in the engine's cells.
        n_ram: Tokens of ``n_before`` that were in other memory.
        n_disk: Tokens of ``n_before`` that were on disk.
        n_computed: Tokens of ``n_before`` that the system computed again on entering, because they
            were nowhere or slow to read.
        n_missing: Tokens of ``n_before`` that were nowhere; the replay charges their evaluation.
        enter_s: Seconds to bring the context in, reclaim of memory included.
        recompute_s: Seconds charged for ``n_missing``, from the measured cost.
        leave_s: Seconds that the caller waits after the reply.
        background_s: Seconds of work ahead of time after the reply, within the idle time.
        read_bytes: Bytes read from the device before evaluation, while the caller waits.
        written_bytes: Bytes written to the device before evaluation, while the caller waits.
        later_read_bytes: Bytes read from the device in the rest of the call.
        later_written_bytes: Bytes written to the device in the rest of the call.
    """

    context: int
    is_switch: bool
    slides: bool
    n_before: int
    n_new: int
    n_resident: int
    n_ram: int
    n_disk: int
    n_computed: int
    n_missing: int
    enter_s: float
    recompute_s: float
    leave_s: float
    background_s: float
    read_bytes: int
    written_bytes: int
    later_read_bytes: int
    later_written_bytes: int

    @property
    def switch_s(self) -> float:
        """Seconds from the call's arrival until evaluation of its new tokens could start."""
        return self.enter_s + self.recompute_s


@dataclass(frozen=True, slots=True)
class RunResult:
    """One system on one trace.

    Attributes:
        calls: Every measured call; empty if the system could not run.
        failure: Reason why the system could not run; None if it ran.
        base_bytes: Bytes that the system's process needs without any context.
        limit_bytes: Limit of the bytes beyond ``base_bytes``.
        peak_bytes: Peak of the bytes beyond ``base_bytes``.
        status: Report of the system about itself.
    """

    calls: Sequence[CallResult]
    failure: str | None = None
    base_bytes: int = 0
    limit_bytes: int = 0
    peak_bytes: int = 0
    status: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Return the result that ``to_json`` turned into ``values``."""
        return cls(**{**values, "calls": [CallResult(**call) for call in values["calls"]]})
