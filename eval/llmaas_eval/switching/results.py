"""What a replay finds out, as plain JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

__all__ = ["CallResult", "RunResult"]


@dataclass(frozen=True, slots=True)
class CallResult:
    """One call.

    Attributes:
        context: Whose.
        is_switch: Another context was called before.
        slides: The call did not fit the context.
        n_before: Tokens the context had.
        n_new: Tokens the call added.
        n_resident: Of those it had, in the engine's cells.
        n_ram: In other memory.
        n_disk: On disk.
        n_computed: Nowhere, or slow to read: computed again on entering.
        n_missing: Nowhere: computed again.
        enter_s: To bring the context in, with reclaim.
        recompute_s: What ``n_missing`` cost, from the measured cost.
        leave_s: What the caller waits for after the reply.
        background_s: Work ahead of time behind the reply, as far as there was idle time for it.
        read_bytes: From the device, on the caller's path before evaluation.
        written_bytes: To the device, likewise.
        later_read_bytes: From the device in the rest of the call.
        later_written_bytes: To the device, likewise.
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
        """From the call's arrival until evaluation of its new tokens could start."""
        return self.enter_s + self.recompute_s


@dataclass(frozen=True, slots=True)
class RunResult:
    """One system on one trace.

    Attributes:
        calls: Every measured call; empty if it could not run.
        failure: Why it could not; None: it did.
        base_bytes: What its process needs without any context.
        limit_bytes: What it was allowed beyond that.
        peak_bytes: Most that it took beyond that.
        status: What the system says of itself.
    """

    calls: Sequence[CallResult]
    failure: str | None = None
    base_bytes: int = 0
    limit_bytes: int = 0
    peak_bytes: int = 0
    status: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Inverse of ``to_json``."""
        return cls(**{**values, "calls": [CallResult(**call) for call in values["calls"]]})
