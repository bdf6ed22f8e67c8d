"""The disk tier: a slab file of encoded chunks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from llmaas_plugins import _native
from llmaas_plugins.kv_chunks.store.extents import page_round
from llmaas_plugins.kv_chunks.store.store_files import FILES
from llmaas_plugins.kv_chunks.store.tier import Tier
from llmaas_plugins.kv_chunks.store.tree import Chunk

__all__ = ["DiskTier"]

_MAX_STALE_RANGES = 1 << 16
_MAX_HELD_PLACES = 16
"""Most freed places to hold: a save that replaces more commits twice, or the file would grow."""


class DiskTier(Tier):
    """The slab file. Page 0 is the header; chunk extents follow.

    Free space may hold bytes of old chunks until it is overwritten or erased. The place of a chunk
    that was freed is held until the index no longer names it (``take_held``, ``release``). Other
    chunks take it earlier only if nothing else is free, or if there are many such places.

    Attributes:
        reuses_held: Whether reserved places may still be named by the index. Commit it before
            they are written.
    """

    HEADER_BYTES = 4096

    def __init__(self, path: Path, budget: int) -> None:
        """Open the file, or create it with mode 0600; it will have at most ``budget`` bytes.

        Reads and writes bypass the page cache if the file system supports it.

        Raises:
            StoreError: The path is not a regular file, or it cannot be opened or made private.
        """
        super().__init__(max(0, budget - self.HEADER_BYTES), "lru")
        self._stale: dict[int, int] | None = None  # lengths by offset; None: all free space
        self._held: list[tuple[int, int]] = []  # offsets and bytes
        self._freed_bytes = 0  # in places that are held, or were taken for a commit
        self.reuses_held = False
        self._file = FILES.open(path, os.O_RDWR | os.O_CREAT)
        try:
            self._direct = os.open(path, os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
        except OSError:  # for example on tmpfs
            self._direct = os.dup(self._file)

    @property
    def used_bytes(self) -> int:
        """Bytes of chunks, in whole pages."""
        return super().used_bytes - self._freed_bytes

    @property
    def fd(self) -> int:
        """File descriptor for native reads and writes of whole blocks."""
        return self._direct

    def file_offset(self, offset: int) -> int:
        """Return an extent's offset in the file."""
        return self.HEADER_BYTES + offset

    def file_size(self) -> int:
        """Return the current length of the file."""
        return os.fstat(self._file).st_size

    def read_header(self) -> bytes:
        """Return the header page, or fewer bytes if the file is new."""
        return os.pread(self._file, self.HEADER_BYTES, 0)

    def write_header(self, header: bytes) -> None:
        """Empty the slab and write ``header`` durably."""
        os.ftruncate(self._file, 0)
        page, n = header.ljust(self.HEADER_BYTES, b"\0"), 0
        while n < len(page):
            n += os.pwrite(self._file, page[n:], n)
        os.fsync(self._file)

    def truncate_to_capacity(self) -> None:
        """Truncate a file that was written under a larger budget."""
        if self.file_size() > self.file_offset(self.capacity):
            os.ftruncate(self._file, self.file_offset(self.capacity))

    def truncate_tail(self) -> None:
        """Truncate the file after the last used byte."""
        runs = self._extents.free_within(0, self.capacity)
        is_tail = bool(runs) and sum(runs[-1]) == self.capacity
        end = self.file_offset(runs[-1][0] if is_tail else self.capacity)
        if self.file_size() > end:
            os.ftruncate(self._file, end)

    # -- freed places ---------------------------------------------------------------------------

    def shrink(self, offset: int, old_bytes: int, new_bytes: int) -> None:
        """Free the end of a chunk that was shortened."""
        tail = page_round(new_bytes)
        self._hold(offset + tail, page_round(old_bytes) - tail)

    def cancel(self, offset: int, n_bytes: int) -> None:
        """Free a reservation, and mark it as stale because some of it may have been written."""
        super().cancel(offset, n_bytes)
        self._mark_stale(offset, n_bytes)

    def free(self, chunk: Chunk, offset: int) -> None:
        """Free the chunk's space at ``offset``, and take the chunk out of the queue."""
        self.queue.remove(chunk)
        self._hold(offset, chunk.size)

    def take_held(self) -> list[tuple[int, int]]:
        """Return the held places, offsets and bytes, whose rows the next commit removes.

        Call ``release`` with them after the commit, or ``hold_again`` if it failed.
        """
        held, self._held, self.reuses_held = self._held, [], False
        return held

    def release(self, held: Sequence[tuple[int, int]]) -> None:
        """Let other chunks take these places."""
        for offset, n_bytes in held:
            self._extents.release(offset, n_bytes)
            self._freed_bytes -= page_round(n_bytes)

    def hold_again(self, held: Sequence[tuple[int, int]], *, reuses_held: bool) -> None:
        """Put back what ``take_held`` changed, after a commit that failed."""
        self._held[:0] = held
        self.reuses_held = self.reuses_held or reuses_held

    def release_early(self) -> bool:
        """Release the held places before the next commit; return whether there were any."""
        had_any = bool(self._held)
        if had_any:
            self.release(self.take_held())
            self.reuses_held = True
        return had_any

    def _hold(self, offset: int, n_bytes: int) -> None:
        if n_bytes > 0:
            self._held.append((offset, n_bytes))
            self._freed_bytes += page_round(n_bytes)
            self._mark_stale(offset, n_bytes)

    def _allocate(self, n_bytes: int) -> int | None:
        if len(self._held) > _MAX_HELD_PLACES:
            self.release_early()
        offset = super()._allocate(n_bytes)
        if offset is None and self.release_early():
            offset = super()._allocate(n_bytes)
        return offset

    # -- old bytes ------------------------------------------------------------------------------

    def take_stale(self) -> list[tuple[int, int]]:
        """Return free ranges of the file that may hold old bytes, with lengths, for ``erase``."""
        self.release_early()
        end = min(self.capacity, page_round(max(0, self.file_size() - self.HEADER_BYTES)))
        marked = {0: end} if self._stale is None else self._stale
        self._stale = {}
        ranges: dict[int, int] = {}
        for offset, n_bytes in marked.items():
            last = min(end, offset + page_round(n_bytes))
            for start, length in self._extents.free_within(offset, last):
                ranges[start] = max(length, ranges.get(start, 0))
        return sorted(ranges.items())

    def erase(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Erase the bytes in these ranges.

        Raises:
            StoreError: The file system failed; a later call tries again.
        """
        offsets = [self.file_offset(offset) for offset, _ in ranges]
        try:
            _native.store_erase(self._file, offsets, [n_bytes for _, n_bytes in ranges])
        except BaseException:
            for offset, n_bytes in ranges:
                self._mark_stale(offset, n_bytes)
            raise

    def _mark_stale(self, offset: int, n_bytes: int) -> None:
        if self._stale is not None and n_bytes > 0:
            self._stale[offset] = max(n_bytes, self._stale.get(offset, 0))
            if len(self._stale) > _MAX_STALE_RANGES:
                self._stale = None

    def close(self) -> None:
        """Close the file descriptors."""
        os.close(self._direct)
        os.close(self._file)
