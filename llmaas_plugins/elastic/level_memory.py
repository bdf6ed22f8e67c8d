"""The memory of the level that drafts, as a claim on the memory of the process."""

from __future__ import annotations

from llmaas_hooks import MemoryClaim, forks
from llmaas_plugins.memory.division import STEP
from llmaas_plugins.memory.recent import TIME_S, RecentSums

__all__ = ["LevelMemory"]

_LEAST_S = 1e-9
"""Least seconds a second of a claim: with 0, the division would take its worth for unknown."""


class LevelMemory:
    """Memory of the level that drafts: what it is worth, and how much of it a level may take.

    Nobody calls the engine with this lock. Whoever divides memory therefore waits for no batch.
    """

    def __init__(self) -> None:
        """Start without a level."""
        self._lock = forks.lock()
        self._said = RecentSums(1)
        self._taken = 0
        self._others_s = 0.0
        self._paid: tuple[int, float] | None = None  # bytes of the level, and seconds a token
        self._allowed: int | None = None

    @property
    def allowed(self) -> int | None:
        """Bytes that other memory leaves to a level; None if it was not divided."""
        with self._lock:
            return self._allowed

    def said(self, n_tokens: int) -> None:
        """Record tokens that were said, with or without drafts."""
        with self._lock:
            self._said.add(0, n_tokens)

    def takes(self, n_bytes: int, others_s: float, allowed: int | None) -> None:
        """Record the memory of the level that drafts now; 0 bytes if none does.

        Args:
            n_bytes: Bytes of the level.
            others_s: Seconds a token that other weights would save in this memory.
            allowed: ``allowed`` when the level was chosen.
        """
        with self._lock:
            self._taken, self._others_s = n_bytes, others_s
            is_settled = n_bytes > 0 or self._paid is None  # it has its memory, or asks for none
            if is_settled and self._allowed == allowed:
                self._allowed = None

    def pays(self, n_bytes: int, saved_s: float) -> None:
        """Record that the drafts of a level of ``n_bytes`` save seconds for each token."""
        with self._lock:
            self._paid = n_bytes, saved_s

    def pays_not(self) -> None:
        """Record that drafts do not pay, whatever memory there is."""
        with self._lock:
            self._paid = None

    def claim(self) -> MemoryClaim | None:
        """Return the claim of the level's memory; None if no level drafts, or could and would pay.

        The memory is part of the weights', which make room for others as a whole.
        """
        with self._lock:
            taken, others_s, paid, allowed = self._taken, self._others_s, self._paid, self._allowed
            a_second = float(self._said.now()[0]) / TIME_S
        size = taken or (0 if paid is None else paid[0])
        if not size:
            return None
        most = -(-size // STEP) * STEP
        points = [(0, 0.0)]
        if paid is not None and paid[0] == size:
            points.append((most - 1, 0.0))
            saved_s = paid[1] * a_second
        else:  # the level is tried, maybe for ever: its memory is worth what other weights save
            saved_s = others_s * a_second
        points.append((most, max(_LEAST_S, saved_s)))
        if allowed is None:
            allowed = most if taken else 0
        return MemoryClaim(
            "level that drafts",
            min(allowed, most),
            most,
            tuple(points),
            self._allow,
            taken=taken,
            why="its drafts let a pass through all weights give several tokens",
        )

    # -- inside ---------------------------------------------------------------------------------

    def _allow(self, n_bytes: int) -> None:
        """Let levels of up to ``n_bytes`` draft, from the next token on."""
        with self._lock:
            self._allowed = n_bytes
