"""Circuit breaker: leaves a service that failed alone for a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Attempt", "CircuitBreaker"]

_FIRST_WAIT_S = 5.0
_LONGEST_WAIT_S = 300.0


@dataclass(frozen=True, slots=True, eq=False)
class Attempt:
    """Attempt at the service.

    Attributes:
        n_waits: Number of waits that had begun before it.
    """

    n_waits: int


class CircuitBreaker:
    """Waits between attempts at a service that fails: 5 s, then twice as long each, up to 300 s.

    After a wait, one attempt probes the service while all others stay away. Success ends the waits.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Expect a service that works; ``clock`` returns seconds."""
        self._clock = clock
        self._wait_s = self._until_s = 0.0
        self._n_waits = 0
        self._probe: Attempt | None = None

    @property
    def left_s(self) -> float:
        """Seconds until the next attempt; 0 if one may begin."""
        return max(0.0, self._until_s - self._clock()) if self._wait_s else 0.0

    @property
    def is_open(self) -> bool:
        """Whether the service has to be left alone now."""
        return self._wait_s > 0 and (self._probe is not None or self.left_s > 0)

    def begin(self) -> Attempt | None:
        """Begin an attempt; return None if the service has to be left alone.

        Call ``worked``, ``failed`` or ``gave_up`` at the attempt's end.
        """
        if self.is_open:
            return None
        attempt = Attempt(self._n_waits)
        if self._wait_s > 0:
            self._probe = attempt
        return attempt

    def worked(self) -> None:
        """Record a success: end the waits."""
        self._wait_s, self._probe = 0.0, None

    def failed(self, attempt: Attempt) -> None:
        """Record a failure: begin the next wait, unless one began since the attempt did."""
        if attempt.n_waits == self._n_waits:
            self._n_waits += 1
            self._wait_s = min(2 * self._wait_s or _FIRST_WAIT_S, _LONGEST_WAIT_S)
            self._until_s = self._clock() + self._wait_s
        self.gave_up(attempt)

    def gave_up(self, attempt: Attempt) -> None:
        """Record an attempt that tells nothing about the service, because its client left."""
        if attempt is self._probe:
            self._probe = None
