"""The level of a streamed model that drafts, and the memory that it takes.

Contexts of a model share the level, because they share its weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmaas_hooks import FileWeights, MemoryClaim, forks
from llmaas_plugins.elastic.draft_worth import Phase, Trust, Worth
from llmaas_plugins.memory.division import STEP
from llmaas_plugins.memory.recent import TIME_S, RecentSums

__all__ = ["LevelDrafts"]

_SPARE = 0.02
"""Share of a level's bytes that must be left for it to be chosen, but not for it to stay."""
_NO_ROOM = "the narrowest level takes {} MiB, but {} MiB of weights may be kept"


@dataclass(slots=True)
class _Waits:
    """Waits for weights that memory does not keep, while no level is kept first."""

    byte_s: float = 0.0
    """Seconds to wait for each such byte in a pass through the weights."""
    _began: Mapping[str, int] | None = None
    _n_passes: int = 0

    def saw(self, n_passes: int, stats: Mapping[str, int]) -> None:
        """Record passes since the last call, and the weights' figures after them."""
        if self._began is None:
            self._began, self._n_passes = stats, 0
            return
        self._n_passes += n_passes
        missed = self._n_passes * (stats["bytes"] - stats["kept_bytes"])
        if missed > 0:
            self.byte_s = (stats["stalled_ns"] - self._began["stalled_ns"]) / 1e9 / missed

    def restart(self) -> None:
        """Forget the passes so far; others come between them and the next ones."""
        self._began = None


@dataclass(slots=True)
class LevelDrafts:
    """Drafts of one model: the level that makes them, and what is known about it.

    Attributes:
        levels: Levels of the model, widest first.
        obstacle: Why there are no drafts; None if nothing prevents them.
        trusts: How likely drafted tokens are kept, by level.
        worth: Whether drafts pay, and of which level.
        proposed: Tokens proposed so far.
        accepted: Proposed tokens that the whole model kept.
        passes: Drafts so far.
        lock: Lock of the drafts: several contexts may use them, each on a thread of its own.
    """

    levels: Sequence[float]
    obstacle: str | None = None
    trusts: dict[int, Trust] = field(default_factory=lambda: defaultdict(Trust))
    worth: Worth = field(default_factory=Worth)
    proposed: int = 0
    accepted: int = 0
    passes: int = 0
    lock: Any = field(default_factory=forks.lock)
    _kept: int | None = -1  # level that memory keeps first; -1: a context that is gone chose it
    _sizes: dict[int, int] = field(default_factory=dict)
    _waits: _Waits = field(default_factory=_Waits)
    _said: RecentSums = field(default_factory=lambda: RecentSums(1))
    _paid: tuple[int, float] | None = None  # bytes of the level that pays, and seconds a token
    _allowed: int | None = None  # bytes that other memory leaves to a level; None: not divided

    def prepare(self, weights: FileWeights) -> int | None:
        """Keep a level first while drafts are made, else none; return the level that drafts.

        The call may wait for the batch that is being evaluated.
        """
        if self.worth.phase is not Phase.DRAFTING:
            self._keep(weights, None)
            return None
        room = weights.stats()["room_bytes"]
        if self._allowed is not None:
            room = min(room, self._allowed)
        self.obstacle = None
        level = self.worth.choose(self._fitting(weights, room))
        self._keep(weights, level)
        if level is not None:
            self._size(weights, level)
            self._allowed = None  # it has its memory, and takes more only from other weights
        return level

    def begin(self) -> None:
        """Begin a request, whose prompt was evaluated since the last token."""
        self._waits.restart()

    def passed(self, weights: FileWeights, n_tokens: int, seconds: Mapping[int, float]) -> None:
        """Record tokens that were said without a draft."""
        self._said.add(0, n_tokens)
        if self.worth.phase is Phase.MEASURING:
            self._waits.saw(n_tokens, weights.stats())
        self.worth.passed(n_tokens, seconds)

    def drafted(self, level: int, n_kept: int, owns: Sequence[float], seconds: float) -> None:
        """Record a draft of a level, of which ``n_kept`` tokens were right.

        Args:
            level: Index of the level.
            n_kept: Tokens that the whole model kept.
            owns: Probability that the level gave each token.
            seconds: Time of the draft, and of the batch that verified it.
        """
        self.passes += 1
        self.proposed += len(owns)
        self.accepted += n_kept
        self._said.add(0, n_kept + 1)
        self.trusts[level].saw(owns, n_kept)
        if level != self.worth.level:  # another context of the model has tried the next one
            return
        self.worth.drafted(n_kept + 1, seconds)
        if self.worth.saved_s is not None:
            size = self._sizes[level]
            self._paid = size, self.worth.saved_s + size * self._waits.byte_s
        elif self.worth.phase is Phase.RESTING:  # it does not pay, whatever memory there is
            self._paid = self._allowed = None

    def claim(self) -> MemoryClaim | None:
        """Return the claim of the level's memory; None if no level drafts, or could and would pay.

        The memory is part of the weights', which make room for others as a whole.
        """
        with self.lock:
            level, paid, allowed = self.worth.level, self._paid, self._allowed
            size = self._sizes[level] if level is not None else paid[0] if paid is not None else 0
            a_second = float(self._said.now()[0]) / TIME_S
        if not size:
            return None
        most = -(-size // STEP) * STEP
        points: tuple[tuple[int, float], ...] = ()
        if paid is not None and paid[0] == size:
            points = ((0, 0.0), (most - 1, 0.0), (most, max(0.0, paid[1] * a_second)))
        if allowed is None:
            allowed = 0 if level is None else most
        return MemoryClaim(
            "level that drafts",
            min(allowed, most),
            most,
            points,
            self._allow,
            taken=0 if level is None else size,
            why="its drafts let a pass through all weights give several tokens",
        )

    def report(self) -> dict[str, Any]:
        """Return the level, whether drafts pay, and the counts."""
        level = self.worth.level
        return {
            "level": None if level is None else self.levels[level],
            "phase": self.worth.phase.name.lower(),
            "gain": self.worth.gain,
            "obstacle": self.obstacle,
            "passes": self.passes,
            "proposed": self.proposed,
            "accepted": self.accepted,
        }

    # -- inside ---------------------------------------------------------------------------------

    def _allow(self, n_bytes: int) -> None:
        """Let levels of up to ``n_bytes`` draft, from the next token on."""
        with self.lock:
            self._allowed = n_bytes
            if n_bytes and self.obstacle is not None:
                self.worth.measure()

    def _fitting(self, weights: FileWeights, room: int) -> range:
        """Return the narrow levels that fit into ``room`` bytes; the present one needs no spare."""
        for level in range(1, len(self.levels)):
            spare = 0 if level == self.worth.level else _SPARE
            if self._size(weights, level) * (1 + spare) <= room:
                return range(level, len(self.levels))
        smallest = min(self._sizes.values(), default=0)
        self.obstacle = _NO_ROOM.format(smallest >> 20, room >> 20)
        return range(0)

    def _size(self, weights: FileWeights, level: int) -> int:
        """Return the bytes that a level takes; the first time, it is chosen to find out."""
        if level not in self._sizes:
            self._keep(weights, level)
            self._sizes[level] = weights.stats()["level_bytes"]
        return self._sizes[level]

    def _keep(self, weights: FileWeights, level: int | None) -> None:
        if level != self._kept:
            weights.keep_level(level)
            self._kept = level
