"""The level of a streamed model that drafts.

Contexts of a model share the level, because they share its weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmaas_hooks import FileWeights, forks
from llmaas_plugins.elastic.draft_worth import Phase, Trust, Worth
from llmaas_plugins.elastic.level_memory import LevelMemory

__all__ = ["LevelDrafts"]

_SPARE = 0.02
"""Share of a level's bytes that must be left of the weights' memory for the level to be chosen, but
not for it to stay."""
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
        memory: Memory of the level, as a claim.
        lock: Lock of the drafts: several contexts may use them, each on a thread of its own.
            Whoever holds it may wait for a batch of another context.
    """

    levels: Sequence[float]
    obstacle: str | None = None
    trusts: dict[int, Trust] = field(default_factory=lambda: defaultdict(Trust))
    worth: Worth = field(default_factory=Worth)
    proposed: int = 0
    accepted: int = 0
    passes: int = 0
    memory: LevelMemory = field(default_factory=LevelMemory)
    lock: Any = field(default_factory=forks.lock)
    _kept: int | None = -1  # kept first; -1: unknown, maybe one that an earlier context chose
    _sizes: dict[int, int] = field(default_factory=dict)
    _waits: _Waits = field(default_factory=_Waits)
    _allowed: int | None = None  # bytes that other memory left to a level at the last token

    def prepare(self, weights: FileWeights) -> int | None:
        """Keep a level first while drafts are made, else none; return the level that drafts.

        The call may wait for the batch that is being evaluated.
        """
        allowed, before = self.memory.allowed, self._allowed
        self._allowed = allowed
        if allowed and allowed != before and self.obstacle is not None:
            self.worth.measure()
        level = None
        if self.worth.phase is Phase.DRAFTING:
            self.obstacle = None
            level = self.worth.choose(self._fitting(weights, allowed))
        self._keep(weights, level)
        size = 0 if level is None else self._size(weights, level)
        self.memory.takes(size, self._waits.byte_s, allowed)
        return level

    def begin(self) -> None:
        """Begin a request, whose prompt was evaluated since the last token."""
        self._waits.restart()

    def passed(self, weights: FileWeights, n_tokens: int, seconds: Mapping[int, float]) -> None:
        """Record tokens that were said without a draft."""
        self.memory.said(n_tokens)
        if self.worth.phase is Phase.MEASURING:
            self._waits.saw(n_tokens, weights.stats())
        else:
            self._waits.restart()
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
        self.memory.said(n_kept + 1, n_drafted=n_kept)
        self._waits.restart()
        self.trusts[level].saw(owns, n_kept)
        if level != self.worth.level:  # another context of the model has tried the next one
            return
        self.worth.drafted(n_kept + 1, seconds)
        if self.worth.saved_s is not None:
            self.memory.pays(self._sizes[level], self.worth.saved_s)
        elif self.worth.phase is Phase.RESTING:
            self.memory.pays_not()

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

    def _fitting(self, weights: FileWeights, allowed: int | None) -> range:
        """Return the narrow levels that fit; the present one needs no spare memory.

        Args:
            weights: Weights of the model.
            allowed: Most bytes of a level; None if only the weights' memory limits it.
        """
        room = weights.stats()["room_bytes"]
        most = room if allowed is None else allowed
        for level in range(1, len(self.levels)):
            spare = 0 if level == self.worth.level else _SPARE
            size = self._size(weights, level)
            if size <= most and size * (1 + spare) <= room:
                return range(level, len(self.levels))
        smallest = min(self._sizes.values(), default=0)
        self.obstacle = _NO_ROOM.format(smallest >> 20, min(room, most) >> 20)
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
