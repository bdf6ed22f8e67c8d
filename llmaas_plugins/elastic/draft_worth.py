"""How likely drafted tokens are right, and which level's drafts pay, learned from drafts."""

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
    """Probability that a level's drafted token is kept, by the probability that the level gave."""

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


def _spread(levels: Sequence[int]) -> list[int]:
    """Return up to ``_N_TRIED`` levels, the first and the last among them."""
    n = min(_N_TRIED, len(levels))
    return [levels[round(i * (len(levels) - 1) / max(1, n - 1))] for i in range(n)]


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
_N_TRIED = 3
"""Most levels that are tried."""


class Worth:
    """Whether drafts pay, and of which level: tokens a second with them, against those without.

    The widest level that fits is tried first, and then up to two narrower ones, as long as each
    says more tokens a second than the one before. A narrower level is faster and leaves memory to
    other weights, but it is less often right.

    Attributes:
        phase: Stage of the comparison.
        level: Index of the level that drafts now; None if none does.
    """

    def __init__(self) -> None:
        """Start by timing tokens without drafts."""
        self.phase = Phase.MEASURING
        self.level: int | None = None
        self._candidates: Sequence[int] = ()
        self._gains: dict[int, float] = {}  # of levels that were tried
        self._is_settled = False
        self._n_here = 0  # tokens or drafts in this phase, at this level
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
    def saved_s(self) -> float | None:
        """Seconds that drafts save for each token; None if too few drafts were timed."""
        return None if self.gain is None else self._alone_s - self._taken_s / self._tokens

    @property
    def is_warming_up(self) -> bool:
        """Whether the next draft does not count; a long one then tells what its batch takes."""
        return self._n_here < _N_WARM

    @property
    def least_chance_a_s(self) -> float:
        """Probability of being kept that pays for each second of a longer draft."""
        with_drafts = self._tokens / self._taken_s if self._taken_s else 0.0
        return max(with_drafts, 1 / self._alone_s if self._alone_s else 0.0)

    def choose(self, fitting: Sequence[int]) -> int | None:
        """Return the level that drafts next; without any, drafts rest.

        Args:
            fitting: Indices of the levels that fit into memory, widest first.
        """
        if not fitting:
            self.rest()
        elif self.level not in fitting:
            self._candidates = _spread(fitting)
            self._gains.clear()
            self._try(fitting[0])
        return self.level

    def passed(self, n_tokens: int, seconds: Mapping[int, float]) -> None:
        """Record tokens that were said without a draft of a level."""
        if self.phase is Phase.DRAFTING:
            return
        self._n_here += n_tokens
        if self.phase is Phase.RESTING and self._n_here >= self._rest:
            self._rest = min(2 * self._rest, _LONGEST_REST)
            self._enter(Phase.MEASURING)
        elif self.phase is Phase.MEASURING and self._n_here >= _N_MEASURED and 1 in seconds:
            self._alone_s = seconds[1]
            self._enter(Phase.DRAFTING)

    def drafted(self, n_tokens: int, seconds: float) -> None:
        """Record a draft: the tokens that it gave, and the time of it and of its batch."""
        if self.phase is not Phase.DRAFTING:  # another context of the model ended drafts
            return
        self._n_here += 1
        if self._n_here <= _N_WARM:
            return
        self._tokens = self._tokens * _CYCLE_FADE + n_tokens
        self._taken_s = self._taken_s * _CYCLE_FADE + seconds
        is_lost = self._n_here >= _N_WARM + _N_LOST and self._ratio() < _LOST_GAIN
        if is_lost or self.gain is not None:
            self._judge(self._ratio())

    def rest(self) -> None:
        """Make no drafts for a while, each time for twice as long."""
        self._enter(Phase.RESTING)

    def measure(self) -> None:
        """Rest no longer: there is memory for a level that there was not."""
        if self.phase is Phase.RESTING:
            self._enter(Phase.MEASURING)

    # -- inside ---------------------------------------------------------------------------------

    def _judge(self, gain: float) -> None:
        """Go on with the level that drafts, try another one, or end drafts."""
        assert self.level is not None
        self._gains[self.level] = gain
        best = max(self._gains, key=lambda level: self._gains[level])
        narrower = [one for one in self._candidates if one > self.level]
        if not self._is_settled and best == self.level and narrower:
            self._try(narrower[0])
        elif self._gains[best] < _LEAST_GAIN:
            self.rest()
        elif not self._is_settled and best != self.level:
            self._try(best)
            self._is_settled = True
        elif gain < _LEAST_GAIN:
            self.rest()
        elif gain < _SURE_GAIN and self._n_here >= _RENEWED:
            self._enter(Phase.MEASURING)
        else:
            self._is_settled = True
            self._rest = _SHORTEST_REST if gain >= _SURE_GAIN else self._rest

    def _try(self, level: int) -> None:
        self.level, self._is_settled = level, False
        self._n_here, self._tokens, self._taken_s = 0, 0.0, 0.0

    def _ratio(self) -> float:
        return self._tokens / self._taken_s * self._alone_s

    def _enter(self, phase: Phase) -> None:
        self.phase, self.level, self._n_here = phase, None, 0
