"""Time that a scorer takes by a prompt's length, as it was measured."""

from __future__ import annotations

from collections import deque

import numpy as np

__all__ = ["MeasuredSeconds"]

_N_TIMES = 32
"""Last prompts whose times count."""


class MeasuredSeconds:
    """Straight line through the times of the last prompts."""

    def __init__(self, first_s: float | None = None) -> None:
        """Start without times; ``first_s`` are the seconds of a token until there are some."""
        self._times: deque[tuple[int, float]] = deque(maxlen=_N_TIMES)
        self._line = None if first_s is None else (0.0, first_s)

    def add(self, n_tokens: int, seconds: float) -> None:
        """Record the time of a prompt."""
        self._times.append((n_tokens, seconds))
        sizes, times = np.array(self._times).T
        slope, start = float(times.sum() / max(1.0, sizes.sum())), 0.0
        if np.ptp(sizes) > 0:
            spread = sizes - sizes.mean()
            steeper = float(spread @ times / (spread @ spread))
            rest = float(times.mean() - steeper * sizes.mean())
            if steeper >= 0 and rest >= 0:  # else the line would be negative somewhere
                slope, start = steeper, rest
        self._line = start, slope

    def at(self, n_tokens: int) -> float | None:
        """Return about how long a prompt takes; None if that is unknown."""
        if self._line is None:
            return None
        start, slope = self._line
        return start + slope * n_tokens
