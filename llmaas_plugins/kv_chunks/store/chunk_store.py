"""Chunks in RAM and on disk, within byte budgets: claim, reclaim, load and fault (LLMS §3.1).

``put`` claims a chunk, encoded, in RAM, and ``flush`` writes it to disk ahead of time. Reclaiming
its RAM then needs no I/O, and ``reader`` loads it back on demand. A damaged chunk is a fault: it is
dropped, and its tokens are evaluated again.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import MemoryClaim, Tokens, forks
from llmaas_plugins import _native
from llmaas_plugins._native import Budget
from llmaas_plugins.kv_chunks.store.chunk_ids import ChunkId
from llmaas_plugins.kv_chunks.store.chunk_reader import ChunkReader
from llmaas_plugins.kv_chunks.store.chunk_writer import ChunkWriter
from llmaas_plugins.kv_chunks.store.disk_store import DiskStore
from llmaas_plugins.kv_chunks.store.eviction import EvictionPolicy
from llmaas_plugins.kv_chunks.store.extents import page_round
from llmaas_plugins.kv_chunks.store.ram_space import RamSpace
from llmaas_plugins.kv_chunks.store.residency import ChunkResidency
from llmaas_plugins.kv_chunks.store.reuse import MissCosts, ReuseCurve
from llmaas_plugins.kv_chunks.store.tree import ABSENT, Chunk, ChunkTree, PrefixMatch, names_of
from llmaas_plugins.signals import signals_wait

__all__ = ["ChunkStore", "StoredContext"]

_MOST_LAYOUTS = 1024
"""Most layouts in memory; each app has its own, and the clients of a service name the apps."""


class StoredContext(NamedTuple):
    """Tokens of a context whose chunks are known.

    Attributes:
        root: Root of the context's chain of chunks.
        tokens: Token ids, shape ``(n,)``.
        in_ram: Whether each token's chunk is in RAM, shape ``(n,)``.
        on_disk: Whether each token's chunk is on disk, shape ``(n,)``.
        ram_bytes: Bytes of the chunks in RAM, which other contexts may share.
        disk_bytes: Bytes of the chunks on disk.
    """

    root: bytes
    tokens: Tokens
    in_ram: NDArray[np.bool_]
    on_disk: NDArray[np.bool_]
    ram_bytes: int
    disk_bytes: int


class ChunkStore(forks.Forked):
    """The chunks of one process. Thread-safe; I/O and codecs run outside the lock.

    Attributes:
        space: Allocator of the RAM tier.
        reader: Reader of chunks from disk into RAM.
    """

    def __init__(
        self,
        budget: Budget,
        disk: DiskStore | None,
        *,
        eviction: EvictionPolicy = "lru",
        write_budget: int | None = None,
    ) -> None:
        """Give the rest of ``budget`` to the RAM tier, and take over an opened disk tier.

        Args:
            budget: Byte budget of RAM.
            disk: Disk tier, or None.
            eviction: Order in which chunks leave RAM.
            write_budget: Bytes that may be written to disk each day; None for no limit.

        Raises:
            StoreError: The index cannot be read.
        """
        try:
            self._residency = ChunkResidency(budget, None if disk is None else disk.tier, eviction)
            self._writer = (
                None if disk is None else ChunkWriter(self._residency, disk, write_budget)
            )
        except BaseException:
            if disk is not None:
                disk.close()
            raise
        self.space = RamSpace(self._residency, self._writer)
        self.reader = ChunkReader(self._residency, self.space)
        self._layouts: OrderedDict[bytes, str] = OrderedDict()
        self._reuse = ReuseCurve()
        forks.watch(self)

    @property
    def tree(self) -> ChunkTree:
        """All chunks."""
        return self._residency.tree

    # -- lookup ---------------------------------------------------------------------------------

    def match(self, root: bytes, tokens: Tokens) -> PrefixMatch:
        """Return the chunks of the longest stored prefix of ``tokens``, shape ``(n,)``."""
        with self._residency.lock:
            return self._residency.tree.match(root, tokens)

    def stored(self, context_id: str) -> StoredContext | None:
        """Return the tokens of a named context and their tiers, or None if it is unknown."""
        with self._residency.lock:
            path = self._residency.tree.longest_path(context_id)
            tiers = [(chunk.n_tokens, chunk.ram != ABSENT, chunk.disk != ABSENT) for chunk in path]
            sizes = [chunk.size for chunk in path]
        if not path:
            return None
        tokens = np.frombuffer(b"".join(chunk.id.tokens for chunk in path), dtype="<i4")
        n_tokens, in_ram, on_disk = zip(*tiers, strict=True)
        return StoredContext(
            path[0].id.parent,
            tokens,
            np.repeat(np.array(in_ram, dtype=bool), n_tokens),
            np.repeat(np.array(on_disk, dtype=bool), n_tokens),
            sum(itertools.compress(sizes, in_ram)),
            sum(itertools.compress(sizes, on_disk)),
        )

    def touch(self, ids: Sequence[ChunkId]) -> None:
        """Mark the stored chunks of a context as used, the last chunk first."""
        with self._residency.changing():
            self._residency.touch([chunk for chunk in self.find(ids) if chunk is not None])

    def missing(self, ids: Sequence[ChunkId]) -> list[int]:
        """Return the indices of the identities whose bytes are stored nowhere."""
        found = enumerate(self.find(ids))
        return [i for i, chunk in found if chunk is None or chunk.is_ghost]

    def layout(self, root: bytes) -> str | None:
        """Return the layout of the cells under ``root``, as JSON, or None if none was saved."""
        if root not in self._layouts and self._writer is not None:
            found = self._writer.layout(root)
            if found is not None:
                self._keep_layout(root, found)
        return self._layouts.get(root)

    def set_layout(self, root: bytes, layout: str) -> None:
        """Store the layout of the cells under ``root``."""
        self._keep_layout(root, layout)
        with self._residency.changing():  # committed together with the chunks that use it
            self._residency.update.layouts[root] = layout

    def _keep_layout(self, root: bytes, layout: str) -> None:
        self._layouts[root] = layout
        while len(self._layouts) > _MOST_LAYOUTS:
            self._layouts.popitem(last=False)

    # -- claim ----------------------------------------------------------------------------------

    @signals_wait()  # until a chunk owns the reserved space
    def put(
        self,
        wanted: ChunkId,
        bound: int,
        encode: Callable[[NDArray[np.uint8]], int],
        *,
        is_first: bool,
        context_id: str | None = None,
    ) -> bool:
        """Claim space for a chunk and let ``encode`` fill it.

        Args:
            wanted: Identity of the chunk.
            bound: Most bytes that ``encode`` may write.
            encode: Function that fills the given array and returns the number of bytes written.
            is_first: Whether the chunk begins a context; any other chunk needs its parent.
            context_id: Named context that the chunk continues, or None. It ends with a new chunk
                at once: the disk may get the chunk before the context's last.

        Returns:
            False if there is no space for the chunk or its parent is missing; the chunk will be
            recomputed.
        """
        offset = self.space.reserve(bound, wanted.parent)
        if offset is None:
            return False
        try:
            buffer = self._residency.ram.view(offset, page_round(bound))
            size = encode(buffer[:bound])
            bits = _native.chunk_peek(buffer[:size]).bits
            buffer[size : page_round(size)] = 0  # whole pages are written to the slab
        except BaseException:
            with self._residency.changing():
                self._residency.ram.cancel(offset, bound)
            raise
        with self._residency.changing():
            self._residency.ram.shrink(offset, bound, size)
            existing = self._residency.tree.get(wanted.key)
            is_stored = (
                existing is not None and not existing.is_ghost
            )  # another engine stored it first
            if is_stored or not (is_first or self._residency.tree.get(wanted.parent)):
                self._residency.ram.cancel(offset, size)
                return is_stored
            self._add(Chunk(wanted, size, bits, ram=offset), existing, context_id)
        return True

    def _add(self, chunk: Chunk, ghost: Chunk | None, context_id: str | None) -> None:
        if ghost is not None:
            chunk.attention, chunk.n_scores = ghost.attention, ghost.n_scores
        self._residency.add(chunk)
        if context_id is not None and ghost is None:
            self._end_with(context_id, chunk)
        for old in self._residency.tree.superseded_by(chunk.id):
            self._residency.drop(old)
        self._residency.counters.claimed_chunks += 1
        self._residency.counters.claimed_bytes += chunk.size

    def drop_replaced_tail(self, context_id: str, ids: Sequence[ChunkId]) -> None:
        """Drop the chunks that only this context needs and that are not in ``ids``."""
        kept = {wanted.key for wanted in ids}
        with self._residency.changing():
            for chunk in self._residency.tree.chunks_only_in(context_id):
                if chunk.id.key in kept:
                    break
                self._residency.drop(chunk)

    def set_head(self, context_id: str, ids: Sequence[ChunkId]) -> None:
        """Let a named context end with the last of the leading stored chunks of ``ids``."""
        with self._residency.changing():
            found = itertools.takewhile(bool, self.find(ids))
            whole = [chunk for chunk in found if chunk is not None]
            if whole:
                self._end_with(context_id, whole[-1])

    def _end_with(self, context_id: str, last: Chunk) -> None:
        old = self._residency.tree.set_head(context_id, last.id.key)
        if old is not None:
            for chunk in list(self._residency.tree.removable_from(old)):
                self._residency.drop(chunk)

    # -- tolerance (LLMS §3.2), working sets (§3.4) -----------------------------------------------

    def add_attention(
        self, ids: Sequence[ChunkId], attention: Iterable[float], n_scores: Iterable[float]
    ) -> None:
        """Add attention and score counts to the stored chunks of a context."""
        with self._residency.changing():
            for chunk, amount, n in zip(self.find(ids), attention, n_scores, strict=True):
                if chunk is not None:
                    self._residency.add_attention(chunk, amount, n)

    def find(self, ids: Sequence[ChunkId]) -> list[Chunk | None]:
        """Return the stored chunk, possibly a ghost, or None for each identity."""
        with self._residency.lock:
            return [self._residency.tree.get(wanted.key) for wanted in ids]

    def reduce_bits(
        self, ids: Sequence[ChunkId], bits: Sequence[int], size: Callable[[int, int], int]
    ) -> None:
        """Shorten chunks to at most the given bits per value; skip chunks that are in use.

        Args:
            ids: Identities of the chunks.
            bits: Most bits per value of each chunk.
            size: Function from tokens and bits to the bytes of a chunk.
        """
        with self._residency.changing():
            for chunk, most in zip(self.find(ids), bits, strict=True):
                if chunk is not None and chunk.pins == 0 and chunk.bits > most:
                    self._residency.truncate(chunk, size(chunk.n_tokens, most), most)

    def lock_working_set(self, owner: Hashable, chunks: Iterable[Chunk | None]) -> None:
        """Set the chunks of the context that ``owner`` runs, which leave RAM last (LLMS §3.4)."""
        with self._residency.lock:  # one assignment: no signal leaves half of it
            self._residency.lock_working_set(owner, filter(None, chunks))

    # -- memory of the process ------------------------------------------------------------------

    def record_use(self, ids: Sequence[ChunkId], wanted: range, costs: MissCosts) -> None:
        """Record what a request used, for the worth of RAM.

        Args:
            ids: Identities of the request's chunks.
            wanted: Indices of those that could be used again.
            costs: Time that they take if they are not in RAM.
        """
        seconds = (costs.byte_s, 0.0) if self._writer is not None else (0.0, costs.chunk_s)
        with self._residency.lock:
            self._reuse.wanted([ids[i].key for i in wanted if i < len(ids)], *seconds)
            sizes = [None if one is None else page_round(one.size) for one in self.find(ids)]
            self._reuse.used([wanted.key for wanted in ids], sizes)

    def claims(self) -> list[MemoryClaim]:
        """Return the claims of the chunks in RAM, and of what is taken beside them."""
        buffers, ram = self.space.buffer_bytes, self._residency.ram
        most = max(0, ram.capacity - buffers)
        with self._residency.lock:
            points = self._reuse.points(most)
        process = self.space.process
        held, least = process.allowed_bytes, min(process.least_bytes, most)
        taken = max(0, ram.resident_bytes - buffers)
        parked = max(0, ram.lent - self.space.withheld_bytes)
        why = "contexts that are used again are neither read nor computed"
        return [
            MemoryClaim("contexts in RAM", held, most, points, process.allow, least, taken, why),
            MemoryClaim.reserved(
                "cells of parked contexts",
                parked,
                "lent by contexts in RAM: a switch copies nothing",
            ),
            MemoryClaim.reserved(
                "transfer buffers", buffers, "contexts pass through them on their way to the engine"
            ),
        ]

    # -- eviction, end ----------------------------------------------------------------------

    def flush(self) -> None:
        """Write every dirty chunk to disk and commit the index; count and log errors."""
        if self._writer is not None:
            self._writer.flush()

    def compact(self) -> None:
        """Close the gaps that shortened chunks left in RAM, if moving chunks is worthwhile."""
        with self._residency.changing():
            self._residency.ram.compact()

    def evict_context(self, context_id: str) -> int:
        """Delete for good what only this context needs, in every tier; return the bytes freed.

        Raises:
            StoreError: Some of it is still on disk; the next call or commit tries again.
        """
        freed, residency = 0, self._residency
        with residency.changing():
            for name in names_of(context_id):
                for chunk in residency.tree.forget_context(name):
                    freed += chunk.size
                    residency.drop(chunk)
        if self._writer is not None:
            self._writer.erase_freed()
        return freed

    def stats(self) -> dict[str, object]:
        """Return sizes and counters as JSON types."""
        self.space.remove_closed_owners()
        obtainable = self.space.capacity
        with self._residency.lock:
            tree, ram, disk = self._residency.tree, self._residency.ram, self._residency.disk
            levels = Counter(chunk.bits for chunk in tree if chunk.bits)
            return {
                "chunks": len(tree),
                "levels": {str(bits): n for bits, n in sorted(levels.items(), reverse=True)},
                "contexts": tree.n_contexts,
                "ram_bytes": ram.used_bytes - self.space.buffer_bytes,
                "buffer_bytes": self.space.buffer_bytes,
                "lent_bytes": ram.lent - self.space.withheld_bytes,
                "withheld_bytes": self.space.withheld_bytes,
                "ram_budget_bytes": ram.capacity,
                "obtainable_bytes": obtainable,
                "disk_bytes": 0 if disk is None else disk.used_bytes,
                "disk_budget_bytes": 0 if disk is None else disk.capacity,
                "store": str(self._writer.directory) if disk and self._writer else None,
                **self._residency.counters.snapshot(),
            }

    def close(self) -> None:
        """Write dirty chunks and close the files; Ctrl-C ends the writing, not the closing."""
        if self._writer is not None:
            try:
                self._writer.flush()
            finally:
                self._writer.close()

    # -- fork -----------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Lock the store until ``after_fork``."""
        self._residency.lock.acquire()

    def after_fork(self, *, in_child: bool) -> None:
        """Unlock the store; in a child, continue with RAM alone, as the files are the parent's."""
        if in_child:
            self._residency.end_other_transfers()
        if in_child and self._writer is not None:
            self._writer.abandon()
            self._writer = None
            self._residency.detach_disk()
        self._residency.lock.release()
