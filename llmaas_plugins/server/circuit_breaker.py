"""Circuit breaker: leaves a service that failed alone for a while."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["CircuitBreaker"]

_FIRST_WAIT_S = 5.0
_LONGEST_WAIT_S = 300.0


class CircuitBreaker:
    """Waits between attempts at a service that fails: 5 s, then twice as long each, up to 300 s.

    After a wait, one attempt probes the service while all others stay away. Success ends the waits.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Expect a service that works; ``clock`` returns seconds."""
        self._clock = clock
        self._wait_s = self._until_s = 0.0
        self._is_probing = False

    @property
    def left_s(self) -> float:
        """Seconds until the next attempt; 0 if one may begin."""
        return max(0.0, self._until_s - self._clock()) if self._wait_s else 0.0

    @property
    def is_open(self) -> bool:
        """Whether the service has to be left alone now."""
        return self._wait_s > 0 and (self._is_probing or self.left_s > 0)

    def begin(self) -> bool:
        """Return whether an attempt may begin.

        If so, call ``worked``, ``failed`` or ``gave_up`` at its end.
        """
        if self.is_open:
            return False
        self._is_probing = self._wait_s > 0
        return True

    def worked(self) -> None:
        """Record a success: end the waits."""
        self._wait_s, self._is_probing = 0.0, False

    def failed(self) -> None:
        """Record a failure: begin the next wait, unless one began since the attempt did."""
        if self.left_s == 0:
            self._wait_s = min(2 * self._wait_s or _FIRST_WAIT_S, _LONGEST_WAIT_S)
            self._until_s = self._clock() + self._wait_s
        self._is_probing = False

    def gave_up(self) -> None:
        """Record an attempt that tells nothing about the service, because its client left."""
        self._is_probing = False
