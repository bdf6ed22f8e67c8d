"""The memory of the level that drafts, as a claim on the memory of the process."""

from __future__ import annotations

from llmaas_hooks import MemoryClaim, forks
from llmaas_plugins.memory.division import STEP
from llmaas_plugins.memory.recent import TIME_S, RecentSums

__all__ = ["LevelMemory"]

_SAID, _PASSED = range(2)


class LevelMemory:
    """Memory of the level that drafts: what it is worth, and how much of it a level may take.

    Nobody calls the engine with this lock. Whoever divides memory therefore waits for no batch.
    """

    def __init__(self) -> None:
        """Start without a level."""
        self._lock = forks.lock()
        self._sums = RecentSums(2)
        self._taken = 0
        self._byte_s = 0.0
        self._paid: tuple[int, float] | None = None  # bytes of the level, and seconds a token
        self._allowed: int | None = None

    @property
    def allowed(self) -> int | None:
        """Bytes that other memory leaves to a level; None if it was not divided."""
        with self._lock:
            return self._allowed

    def passed(self) -> None:
        """Record a pass through the weights: a batch of a prompt or of an answer."""
        with self._lock:
            self._sums.add(_PASSED, 1)

    def said(self, n_tokens: int, *, n_drafted: int = 0) -> None:
        """Record tokens that were said; a level's draft has spared ``n_drafted`` of them a pass."""
        with self._lock:
            self._sums.add(_SAID, n_tokens)
            self._sums.add(_PASSED, n_drafted)

    def takes(self, n_bytes: int, byte_s: float, allowed: int | None) -> None:
        """Record the memory of the level that drafts now; 0 bytes if none does.

        Args:
            n_bytes: Bytes of the level.
            byte_s: Seconds to wait for each byte that memory does not keep, in a pass.
            allowed: ``allowed`` when the level was chosen.
        """
        with self._lock:
            self._taken, self._byte_s = n_bytes, byte_s
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
            taken, byte_s, paid, allowed = self._taken, self._byte_s, self._paid, self._allowed
            said, passed = (self._sums.now() / TIME_S).tolist()
        size = taken or (0 if paid is None else paid[0])
        if not size:
            return None
        most = -(-size // STEP) * STEP
        points, saved_s = [(0, 0.0)], size * byte_s * passed  # as other weights would save there
        if paid is not None and paid[0] == size:
            points.append((most - 1, 0.0))
            saved_s += paid[1] * said
        points.append((most, saved_s))
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
