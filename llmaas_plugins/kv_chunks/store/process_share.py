"""Part of the RAM tier that the memory limit of the process leaves to it."""

from __future__ import annotations

from llmaas_hooks import forks
from llmaas_plugins import process_memory
from llmaas_plugins.kv_chunks.store.chunk_writer import ChunkWriter
from llmaas_plugins.kv_chunks.store.extents import PAGE, page_round
from llmaas_plugins.kv_chunks.store.residency import ChunkResidency

__all__ = ["ProcessShare"]

_LIMIT = "process limit"
"""Owner to which the RAM tier lends what the process may not take."""
_STEP = 4 << 20
"""Bytes to ask for at least: each question costs the limit some microseconds."""
_LEAST = 8 << 20
"""Bytes that new chunks get beside those of contexts in use."""


class ProcessShare:
    """Withholder of RAM-tier bytes that the process may not take. Thread-safe.

    With a limit, all bytes are withheld at first, and the tier grows by what it is granted.

    Attributes:
        buffer_bytes: Bytes of all transfer buffers, which stay.
    """

    def __init__(self, residency: ChunkResidency, writer: ChunkWriter | None) -> None:
        """Withhold all bytes of an empty tier if the process has a limit now."""
        self._residency = residency
        self._writer = writer
        self.buffer_bytes = 0
        self._allowed: int | None = None
        self._claiming = forks.lock()  # never taken by release(), which a limit calls
        if process_memory.room() is not None:
            residency.lend(_LIMIT, residency.ram.capacity)
        process_memory.add_user(self)

    @property
    def withheld_bytes(self) -> int:
        """Bytes that the process does not leave to the tier now."""
        return self._residency.lent(_LIMIT)

    @property
    def usable_bytes(self) -> int:
        """Bytes that chunks and transfer buffers may take."""
        return self._residency.ram.usable_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that the tier holds, with those that it lent to parked cells."""
        ram = self._residency.ram
        return ram.resident_bytes + max(0, ram.lent - self.withheld_bytes)

    @property
    def releasable_bytes(self) -> int:
        """Bytes that can be given back: those of chunks."""
        return max(0, self.usable_bytes - self.buffer_bytes)

    @property
    def promised_bytes(self) -> int:
        """Bytes that chunks and transfer buffers may take, and that hold no memory yet."""
        return max(0, self.usable_bytes - self._residency.ram.resident_bytes)

    def claimable(self) -> int:
        """Return the withheld bytes that the tier would get if it asked. Hold no lock.

        The result is negative if the process exceeds its limit: by so much the tier must shrink.
        """
        room = process_memory.room() if self.withheld_bytes else None
        return self._obtainable() if room is None else min(self._obtainable(), room)

    def claim(self, n_bytes: int) -> None:
        """Ask for withheld bytes if the tier has fewer than ``n_bytes`` free. Hold no lock."""
        if not self.withheld_bytes:
            return
        with self._claiming:  # so that no two threads are granted the same bytes
            with self._residency.lock:
                ram = self._residency.ram
                missing = page_round(n_bytes) - (ram.usable_bytes - ram.used_bytes)
            if missing <= 0:
                return
            granted = process_memory.grant(min(self._obtainable(), max(missing, _STEP)))
            with self._residency.changing():
                self._withhold(max(0, self.withheld_bytes - granted // PAGE * PAGE))

    def allow(self, n_bytes: int) -> None:
        """Let chunks and parked cells take up to ``n_bytes``, and give back what is more.

        The chunks of contexts in use stay, because nothing could be saved without room.
        """
        self._allowed = max(n_bytes, self.least_bytes)
        excess = self._owned_bytes - self._allowed
        if excess > 0:
            self.release(excess)

    @property
    def least_bytes(self) -> int:
        """Bytes that chunks and parked cells may take in any case."""
        with self._residency.lock:
            return self._residency.working_bytes() + _LEAST

    @property
    def allowed_bytes(self) -> int:
        """Bytes that chunks may take without asking again whether they may."""
        return self._owned_bytes if self._allowed is None else self._allowed

    @property
    def _owned_bytes(self) -> int:
        """Bytes of chunks and parked cells."""
        mine = self._residency.ram.capacity - self.withheld_bytes
        return max(0, mine - self.buffer_bytes)

    def _obtainable(self) -> int:
        """Return the withheld bytes that chunks are allowed to take."""
        if self._allowed is None:
            return self.withheld_bytes
        return max(0, min(self.withheld_bytes, self._allowed - self._owned_bytes))

    def release(self, n_bytes: int) -> int:
        """Give memory back to the process; return how much.

        Chunks leave RAM in the order of eviction, those of contexts in use last. They are written
        to disk first, and lost if that is impossible.
        """
        before = self.usable_bytes
        left = max(0, before - n_bytes)
        for flushes, may_lose in ((False, False), (True, False), (False, True)):
            if flushes and self._writer is not None:
                self._writer.flush()
            with self._residency.changing():
                excess = max(0, self.usable_bytes - left)
                is_met = self._withhold(self.withheld_bytes + excess, may_lose=may_lose)
                self._withhold(self.withheld_bytes + self.promised_bytes)
            if is_met:
                break
        return before - self.usable_bytes

    def _withhold(self, n_bytes: int, *, may_lose: bool = False) -> bool:
        return self._residency.lend(_LIMIT, n_bytes, may_lose=may_lose)
