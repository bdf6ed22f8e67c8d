"""Read chunks from disk into RAM: on demand, and back into free RAM ahead of time (LLMS §3.4)."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

from llmaas_plugins import _native
from llmaas_plugins.failure_log import FailureLog
from llmaas_plugins.kv_chunks.store.extents import PAGE, page_round
from llmaas_plugins.kv_chunks.store.ram_space import RamSpace
from llmaas_plugins.kv_chunks.store.residency import ChunkResidency
from llmaas_plugins.kv_chunks.store.tree import ABSENT, Chunk

__all__ = ["DEFECTS", "ChunkReader"]

_log = logging.getLogger("llmaas.kv_chunks")
_REFILL_CHUNKS = 16

DEFECTS = {
    _native.Status.ECORRUPT: "its bytes are damaged",
    _native.Status.ESTALE: "another chunk is stored in its place",
    _native.Status.EIO: "it cannot be read",
    _native.Status.EUNSUPPORTED: "its format is unknown",
}
"""Reasons why stored bytes are no chunk, by the status of reading them."""


class ChunkReader:
    """Reader of a store's chunks. Thread-safe; reads run outside the residency's lock."""

    def __init__(self, residency: ChunkResidency, space: RamSpace) -> None:
        """Read into ``space``."""
        self._residency = residency
        self._space = space
        self._n_fetches = 0
        self._read_failures = FailureLog(_log, logging.WARNING)

    def fetch(
        self, chunks: Sequence[Chunk], *, is_ahead: bool = False, was_read: bool = False
    ) -> list[int]:
        """Bring chunks into RAM and pin them until this thread calls ``unpin``.

        Args:
            chunks: Chunks to fetch.
            is_ahead: True if no request waits for them yet.
            was_read: True if they were read for the same load, so that they count as read from disk
                only.

        Returns:
            Addresses of the leading chunks that are in RAM and valid; fewer than ``chunks`` if one
            was damaged or did not fit.
        """
        wanted, n_ready = self._pinned(chunks, is_counted=not was_read), 0
        try:
            absent = [chunk for chunk in wanted if chunk.ram == ABSENT]
            offsets = self._space.reserve_all([chunk.size for chunk in absent])
            self._read(absent[: len(offsets)], offsets, is_ahead=is_ahead)
            with self._residency.changing():
                n_ready = next((i for i, c in enumerate(wanted) if c.ram == ABSENT), len(wanted))
                return [self._residency.ram.address(chunk.ram) for chunk in wanted[:n_ready]]
        finally:
            if n_ready < len(wanted):
                self.unpin(wanted[n_ready:])

    def unpin(self, chunks: Sequence[Chunk]) -> None:
        """Unpin chunks that ``fetch`` returned to this thread."""
        with self._residency.changing():
            self._residency.unpin(chunks)

    def drop_damaged(self, chunk: Chunk) -> None:
        """Drop a chunk whose bytes are unusable."""
        with self._residency.changing():
            self._residency.counters.faults += 1
            self._residency.drop_bytes(chunk)

    def refill(self) -> None:
        """Read chunks back into free RAM, the most recently used ones first.

        Stop as soon as another thread calls ``fetch``.
        """
        n_fetches, wanted = self._n_fetches, self._refill_candidates()
        for i in range(0, len(wanted), _REFILL_CHUNKS):
            chunks, offsets = self._reserve_free(wanted[i : i + _REFILL_CHUNKS])
            self._read(chunks, offsets, is_ahead=True, are_oldest=True)
            with self._residency.changing():
                n_refilled = sum(chunk.ram != ABSENT for chunk in chunks)
                self._residency.counters.refilled_chunks += n_refilled
                self._residency.unpin(chunks)
            if self._n_fetches != n_fetches:
                return

    def _refill_candidates(self) -> list[Chunk]:
        """Return used chunks that are only on disk and fit into free RAM, last used first."""
        with self._residency.lock:
            free = self._residency.ram.usable_bytes - self._residency.ram.used_bytes
            if free < PAGE:
                return []
            absent = [c for c in self._residency.tree if c.used and c.ram == ABSENT != c.disk]
        absent.sort(key=lambda chunk: chunk.used, reverse=True)
        ends = itertools.accumulate(page_round(chunk.size) for chunk in absent)
        return [chunk for chunk, end in zip(absent, ends, strict=True) if end <= free]

    def _reserve_free(self, wanted: Sequence[Chunk]) -> tuple[list[Chunk], list[int]]:
        """Pin the chunks that are still only on disk; return them and free offsets for them."""
        chunks: list[Chunk] = []
        offsets: list[int] = []
        with self._residency.changing():
            for chunk in wanted:
                if chunk.ram != ABSENT or chunk.disk == ABSENT:
                    continue
                offset = self._residency.ram.reserve(
                    chunk.size, _never, self._residency.evict_from_ram
                )
                if offset is None:
                    break
                chunks.append(chunk)
                offsets.append(offset)
            self._residency.pin(chunks)
        return chunks, offsets

    def _pinned(self, chunks: Sequence[Chunk], *, is_counted: bool) -> list[Chunk]:
        """Pin the leading chunks that the store still has, and return them."""
        self._n_fetches += 1
        wanted: list[Chunk] = []
        with self._residency.changing():
            for chunk in chunks:
                if self._residency.tree.get(chunk.id.key) is not chunk or chunk.is_ghost:
                    break
                wanted.append(chunk)
            self._residency.pin(wanted)
            if is_counted:
                n_hits = sum(chunk.ram != ABSENT for chunk in wanted)
                self._residency.counters.ram_hits += n_hits
        return wanted

    def _read(
        self,
        chunks: Sequence[Chunk],
        offsets: Sequence[int],
        *,
        is_ahead: bool,
        are_oldest: bool = False,
    ) -> None:
        tier = self._residency.disk
        if tier is None or not chunks:
            return
        pending: list[tuple[Chunk, int, int]] = []
        with self._residency.changing():
            for chunk, offset in zip(chunks, offsets, strict=True):
                if chunk.ram == ABSENT and chunk.disk != ABSENT:
                    pending.append((chunk, offset, tier.file_offset(chunk.disk)))
                else:  # another thread read or dropped it meanwhile
                    self._residency.ram.cancel(offset, chunk.size)
        statuses = _native.store_read(
            tier.fd,
            [in_file for _, _, in_file in pending],
            [chunk.size for chunk, _, _ in pending],
            [self._residency.ram.address(offset) for _, offset, _ in pending],
            [chunk.id.key for chunk, _, _ in pending],
            is_ahead=is_ahead,
        )
        unusable: list[str] = []
        with self._residency.changing():
            for (chunk, offset, _), status in zip(pending, statuses, strict=True):
                if status == _native.Status.OK and chunk.ram == ABSENT:
                    self._residency.ram.take(chunk, offset, is_oldest=are_oldest)
                    self._residency.counters.disk_hits += 1
                    self._residency.counters.read_bytes += chunk.size
                    continue
                self._residency.ram.cancel(offset, chunk.size)
                if status != _native.Status.OK and self._residency.tree.get(chunk.id.key) is chunk:
                    unusable.append(DEFECTS.get(status, status.name))
                    self.drop_damaged(chunk)
            if unusable:
                found = unusable[0]
                self._read_failures.failed(
                    "a stored chunk is unusable: %s; its tokens are recomputed", found
                )
            elif pending:
                self._read_failures.worked()


def _never(_: Chunk) -> bool:
    return False
