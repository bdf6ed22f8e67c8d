"""How likely drafted tokens are right, and whether drafts pay, learned while they are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto

__all__ = ["Phase", "Trust", "Worth"]

_N_BINS = 10
_PRIOR = 2.0
"""Observations that count for a narrow level's own probabilities."""
_FADE = 0.995
"""Weight of earlier observations at each new one."""


class Trust:
    """Probability that a drafted token is kept, by the probability that its level gave it."""

    def __init__(self) -> None:
        """Start from the narrow level's own probabilities."""
        self._kept = [0.0] * _N_BINS
        self._seen = [0.0] * _N_BINS

    def chance(self, own: float) -> float:
        """Return the probability that a token is kept to which the level gave ``own``."""
        i = _bin_of(own)
        return (self._kept[i] + _PRIOR * own) / (self._seen[i] + _PRIOR)

    @property
    def mean(self) -> float:
        """Share of the verified tokens that were kept."""
        return (sum(self._kept) + _PRIOR / 2) / (sum(self._seen) + _PRIOR)

    def saw(self, owns: Sequence[float], n_kept: int) -> None:
        """Record a draft of tokens with these probabilities, the first ``n_kept`` of them kept.

        Tokens after the first wrong one were not judged.
        """
        for place, own in enumerate(owns[: n_kept + 1]):
            i = _bin_of(own)
            self._kept[i] = self._kept[i] * _FADE + (place < n_kept)
            self._seen[i] = self._seen[i] * _FADE + 1


def _bin_of(own: float) -> int:
    return min(int(own * _N_BINS), _N_BINS - 1)


class Phase(Enum):
    """Stage of the comparison of tokens with and without drafts."""

    MEASURING = auto()
    """Tokens without drafts are timed, with no level kept first."""
    DRAFTING = auto()
    RESTING = auto()
    """Drafts did not pay of late."""


_N_MEASURED = 6
_N_WARM = 6
"""First drafts at a level, which do not count: they fill the memory, and time long batches."""
_N_JUDGED = 24
"""Drafts that must be timed before their gain is known: single ones give 1 to 8 tokens."""
_LEAST_GAIN = 1.03
_N_LOST, _LOST_GAIN = 8, 0.75
"""Drafts after which they end at once if they are as slow as that."""
_SURE_GAIN = 1.3
"""Gain at which tokens without drafts are not timed again."""
_RENEWED = 2048
_SHORTEST_REST, _LONGEST_REST = 256, 4096
_CYCLE_FADE = 0.99


class Worth:
    """Whether drafts pay: tokens a second with them, against tokens a second without.

    Attributes:
        phase: Stage of the comparison.
    """

    def __init__(self) -> None:
        """Start by timing tokens without drafts."""
        self.phase = Phase.MEASURING
        self._n_here = 0  # tokens or drafts in this phase
        self._rest = _SHORTEST_REST
        self._alone_s = 0.0
        self._tokens = self._taken_s = 0.0

    @property
    def gain(self) -> float | None:
        """Tokens a second with drafts over those without; None if too few drafts were timed."""
        if self.phase is not Phase.DRAFTING or self._n_here < _N_WARM + _N_JUDGED:
            return None
        return self._ratio()

    @property
    def is_warming_up(self) -> bool:
        """Whether the next draft does not count; a long one then tells what its batch takes."""
        return self._n_here < _N_WARM

    @property
    def least_chance_a_s(self) -> float:
        """Probability of being kept that pays for each second of a longer draft."""
        with_drafts = self._tokens / self._taken_s if self._taken_s else 0.0
        return max(with_drafts, 1 / self._alone_s if self._alone_s else 0.0)

    def passed(self, n_tokens: int, seconds: Mapping[int, float]) -> None:
        """Record tokens that were said without a draft of this level."""
        if self.phase is Phase.DRAFTING:
            return
        self._n_here += n_tokens
        if self.phase is Phase.RESTING and self._n_here >= self._rest:
            self._rest = min(2 * self._rest, _LONGEST_REST)
            self._enter(Phase.MEASURING)
        elif self.phase is Phase.MEASURING and self._n_here >= _N_MEASURED and 1 in seconds:
            self._alone_s = seconds[1]
            self._enter(Phase.DRAFTING)
            self._tokens = self._taken_s = 0.0

    def drafted(self, n_tokens: int, draft_s: float, verify_s: float) -> None:
        """Record a draft: the tokens that it gave, its own time, and the time of its batch."""
        self._n_here += 1
        if self._n_here <= _N_WARM:
            return
        self._tokens = self._tokens * _CYCLE_FADE + n_tokens
        self._taken_s = self._taken_s * _CYCLE_FADE + draft_s + verify_s
        gain = self.gain
        is_lost = self._n_here >= _N_WARM + _N_LOST and self._ratio() < _LOST_GAIN
        if is_lost or (gain is not None and gain < _LEAST_GAIN):
            self.rest()
        elif gain is not None and gain < _SURE_GAIN and self._n_here >= _RENEWED:
            self._enter(Phase.MEASURING)
        elif gain is not None and gain >= _SURE_GAIN:
            self._rest = _SHORTEST_REST

    def rest(self) -> None:
        """Make no drafts for a while, each time for twice as long."""
        self._enter(Phase.RESTING)

    def _ratio(self) -> float:
        return self._tokens / self._taken_s * self._alone_s

    def _enter(self, phase: Phase) -> None:
        self.phase, self._n_here = phase, 0
