"""Move chunks between the store and one engine: swap-out ahead of time, and loading."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from llama_cpp import llama_cpp
from numpy.typing import NDArray

from llmaas_hooks import (
    BudgetError,
    CellMemory,
    CodecError,
    Engine,
    KVRestored,
    Tokens,
    common_prefix,
)
from llmaas_plugins import _native
from llmaas_plugins._native import Codec, KVGeometry, NativeError, Status
from llmaas_plugins.kv_chunks.compression.attention import ChunkAttention
from llmaas_plugins.kv_chunks.compression.bit_allocator import AttentionSums, BitAllocator
from llmaas_plugins.kv_chunks.parking.cell_budget import ParkedCellBudget
from llmaas_plugins.kv_chunks.parking.parked_contexts import ParkedContexts
from llmaas_plugins.kv_chunks.store.chunk_ids import CHUNK_TOKENS, ChunkId, chain, chunk_key
from llmaas_plugins.kv_chunks.store.chunk_store import ChunkStore
from llmaas_plugins.kv_chunks.store.huge_pages import map_small_pages
from llmaas_plugins.kv_chunks.store.tree import ABSENT, Chunk, PrefixMatch, count_tokens
from llmaas_plugins.kv_chunks.transfer.cell_layout import pack_layout, unpack_layout
from llmaas_plugins.kv_chunks.transfer.cells import KVCells
from llmaas_plugins.kv_chunks.transfer.chunk_load import CellSegment, ChunkLoad, Gap, ReadTimer
from llmaas_plugins.kv_chunks.transfer.cost_profile import CostProfile
from llmaas_plugins.kv_chunks.transfer.direct_load import load_into_cells
from llmaas_plugins.kv_chunks.transfer.pipeline import Loader, Workers
from llmaas_plugins.kv_chunks.transfer.planning import ChunkRun, LoadPlan, plan_load
from llmaas_plugins.kv_chunks.transfer.recompute import evaluate
from llmaas_plugins.kv_chunks.transfer.staging import Staging
from llmaas_plugins.trouble import Trouble

__all__ = ["LoadResult", "Transfer", "TransferParts"]

_NO_WINDOW = 1 << 30
_log = logging.getLogger("llmaas.kv_chunks")


@dataclass(frozen=True, slots=True)
class LoadResult(KVRestored):
    """Result of a load. Tokens that were neither loaded nor recomputed were already in the cells.

    Attributes:
        n_recomputed: Number of tokens that the load evaluated.
        predicted_s: Time that the plan predicted (LLMS, Eq 4); None if too little was known.
        actual_s: Time that the load took.
    """

    n_recomputed: int
    predicted_s: float | None
    actual_s: float


class TransferParts(NamedTuple):
    """Components of a transfer.

    Attributes:
        store: Store of the chunks.
        codec: Encoding of new chunks.
        bit_allocator: Choice of their bits; None if the codec has no levels.
        attention: Attention that the chunks receive; None if it is not measured.
        parking: Contexts that stay in the engine; None without spare cells.
        spare: Memory of the spare cells; None without spare cells.
        memory: Memory of the engine's cells; None if it cannot be written directly.
        recomputes: Whether chunks that are slow to read may be recomputed instead.
        staging: Transfer buffers.
        workers: Threads.
    """

    store: ChunkStore
    codec: Codec
    bit_allocator: BitAllocator | None
    attention: ChunkAttention | None
    parking: ParkedContexts | None
    spare: ParkedCellBudget | None
    memory: CellMemory | None
    recomputes: bool
    staging: Staging
    workers: Workers


class Transfer:
    """Transfer of chunks between the store and one engine."""

    def __init__(
        self, engine: Engine, root: Callable[[str | None], bytes], parts: TransferParts
    ) -> None:
        """Attach to an engine.

        Args:
            engine: Engine that has the cells.
            root: Function from an app's name to the root of its chunk chains.
            parts: Components to work with.
        """
        self._store = parts.store
        self._root = root
        self._codec = parts.codec
        self._bit_allocator = parts.bit_allocator
        self._attention = parts.attention
        self._parking = parts.parking
        self._spare = parts.spare
        self._memory = parts.memory
        self._recomputes = parts.recomputes
        self._staging = parts.staging
        self._workers = parts.workers
        self._ctx = engine.ctx
        self._cells = KVCells(engine.ctx)
        self._n_batch = int(llama_cpp.llama_n_batch(engine.ctx))
        n_threads = int(llama_cpp.llama_n_threads_batch(engine.ctx))
        self._profile_key = chunk_key(root(None), f"profile, {n_threads} threads".encode())
        self._profile = CostProfile(self._store.layout(self._profile_key))
        n_window = int(llama_cpp.llama_model_n_swa(engine.model))
        self._window_chunks = n_window // CHUNK_TOKENS or _NO_WINDOW
        self._geometry: KVGeometry | None = None
        self._is_measured = False
        self._loader: Loader | None = None
        self._owner = object()  # identifies this engine's working set
        self._save_trouble = Trouble(_log, logging.WARNING)
        self._load_trouble = Trouble(_log, logging.WARNING)
        self._layout_trouble = Trouble(_log, logging.WARNING)
        weakref.finalize(self, self._store.space.close_owner, self._owner)

    # -- swap-out -------------------------------------------------------------------------------

    def save(self, tokens: Tokens, context_id: str | None, app: str | None) -> None:
        """Store the chunks of sequence 0 that are stored nowhere yet, and update all chunks' bits.

        Args:
            tokens: Tokens in the cells, shape ``(n,)``.
            context_id: Name of the persistent context that ends with them, or None.
            app: Name of the app that the tokens belong to, or None.

        Raises:
            BudgetError: The RAM budget is too small for this model; nothing was changed.
        """
        root = self._root(app)
        ids = chain(root, tokens)
        attention = self._take_attention(len(tokens))
        bits = None if self._bit_allocator is None else self._bit_allocator.choose(ids, attention)
        if context_id is not None:
            self._store.drop_replaced_tail(context_id, ids)
        missing = self._store.missing(ids)
        if not missing and (not self._is_measured or self._store.layout(root) is None):
            self._measure_geometry(root)  # the stored layout may be damaged
        if missing:
            geometry = self._measure_geometry(root)
            step = Staging.BUFFERS * self._staging.segment_chunks(geometry)
            with self._staging.lock:
                for run in _runs(missing, step, self._window_chunks):
                    if not self._claim(geometry, run, ids, len(tokens), bits):
                        break
                else:
                    self._save_trouble.worked()
        if self._bit_allocator is not None and bits is not None and self._geometry is not None:
            self._bit_allocator.apply(ids, bits, attention, self._geometry)
        self._store.compact()
        self._store.touch(ids)
        self._store.lock_working_set(self._owner, self._store.find(ids))
        if context_id is not None:
            self._store.set_head(context_id, ids)
        self._profile.learn()
        if self._profile.has_unsaved_points:
            self._store.set_layout(self._profile_key, self._profile.to_json())

    def _take_attention(self, n_tokens: int) -> AttentionSums:
        if self._attention is not None:
            return self._attention.take(n_tokens)
        n_chunks = -(-n_tokens // CHUNK_TOKENS)
        return np.zeros(n_chunks), np.zeros(n_chunks)

    def _claim(
        self,
        geometry: KVGeometry,
        run: range,
        ids: Sequence[ChunkId],
        n_tokens: int,
        bits: NDArray[np.int64] | None,
    ) -> bool:
        start = run.start * CHUNK_TOKENS
        end = min(run.stop * CHUNK_TOKENS, n_tokens)
        blob = self._staging.all_buffers[: _native.blob_size(geometry, end - start)]
        if self._cells.read(start, end, blob) != blob.nbytes:
            self._save_trouble.failed("cannot read cells %d…%d; they are not saved", start, end)
            return False
        try:
            _native.blob_sort(geometry, blob, end - start)  # among parked cells the order is mixed
            _native.blob_check(geometry, blob, range(start, end))
        except CodecError as error:
            self._save_trouble.failed("cells %d…%d are not saved: %s", start, end, error)
            return False
        levels = [_native.CHUNK_BITS] * len(ids) if bits is None else bits.tolist()
        return all(
            self._claim_one(
                geometry, ids[i], blob, end - start, i * CHUNK_TOKENS - start, levels[i], i == 0
            )
            for i in run
        )

    def _claim_one(  # noqa: PLR0913, PLR0917  a chunk and its place
        self,
        geometry: KVGeometry,
        wanted: ChunkId,
        blob: NDArray[np.uint8],
        n_cells: int,
        first: int,
        bits: int,
        is_first: bool,
    ) -> bool:
        n_tokens = min(CHUNK_TOKENS, n_cells - first)

        def put(codec: Codec) -> bool:
            at = (blob, n_cells, first, n_tokens, wanted.key)
            return self._store.put(
                wanted,
                _native.chunk_bound(geometry, codec, n_tokens, bits),
                lambda out: _native.chunk_encode(geometry, codec, *at, out, bits),
                is_first=is_first,
            )

        try:
            return put(self._codec)
        except NativeError as error:
            if error.status != Status.EUNSUPPORTED:
                raise
            return put(Codec.RAW)  # the cells contain infinities: keep every bit

    # -- load -----------------------------------------------------------------------------------

    def restore(
        self, prompt: Tokens, resident: Tokens, app: str | None, resident_app: str | None
    ) -> LoadResult | None:
        """Load the longest parked or stored prefix of ``prompt``, if sequence 0 has less of it.

        Some tokens may be recomputed here, if that is faster or their chunks are lost.

        Args:
            prompt: The whole prompt, shape ``(n,)``.
            resident: Tokens in sequence 0, shape ``(m,)``.
            app: Name of the app that asks, or None.
            resident_app: Name of the app that the resident tokens belong to, or None.

        Raises:
            BudgetError: The RAM budget is too small for this model; nothing was changed.
        """
        started = time.perf_counter()
        root, resident_root = self._root(app), self._root(resident_app)
        is_emptied = self._balance(len(resident), len(prompt))
        if is_emptied:
            resident = resident[:0]
        is_own = root == resident_root
        n_common = common_prefix(prompt, resident) if is_own else 0
        n_taken = self._unpark(prompt, resident, root, resident_root)
        if n_taken is None and not is_own:
            is_emptied = True
            self._empty()
        n_present = n_taken or n_common
        match = self._store.match(root, prompt)
        loader = self._loader or self._open_loader(root)
        self._store.lock_working_set(self._owner, match.path)
        loaded = None
        if match.n_tokens > n_present and loader is not None:
            loaded = self._load_behind(loader, match, prompt, n_present, started)
        if loaded is None and (n_taken is not None or is_emptied or app != resident_app):
            loaded = LoadResult(n_present, 0, 0, None, time.perf_counter() - started)
        if loaded is not None and n_taken is not None:
            n_loaded = min(loaded.n_loaded + n_taken - n_common, loaded.n_tokens)
            return dataclasses.replace(loaded, n_loaded=n_loaded)
        return loaded

    def _balance(self, n_resident: int, n_prompt: int) -> bool:
        """Fit parked contexts to the available memory; return whether all cells were emptied."""
        if self._spare is None or not self._spare.balance(n_resident, n_prompt):
            return False
        if self._attention is not None:
            self._attention.announce(0, 0)
        return True

    def _empty(self) -> None:
        """Empty sequence 0, which holds another app's tokens."""
        if self._attention is not None:
            self._attention.announce(0, 0)
        self._cells.truncate(0)

    def close(self) -> None:
        """Free parked contexts and stop measuring attention. No other thread may use the engine."""
        if self._parking is not None:
            self._parking.clear()
        if self._attention is not None:
            self._attention.close()

    def forget_parked(self) -> None:
        """Make the next request free all parked contexts first. Callable from any thread."""
        if self._parking is not None:
            self._parking.clear_later()

    def parked_stats(self) -> dict[str, int]:
        """Return counters of the parked contexts."""
        parking, spare = self._parking, self._spare
        return (parking.stats() if parking else {}) | (spare.stats() if spare else {})

    def _unpark(
        self, prompt: Tokens, resident: Tokens, root: bytes, resident_root: bytes
    ) -> int | None:
        """Resume the best parked context; return its number of tokens, or None if there is none."""
        if self._parking is None:
            return None
        where = (lambda _: None) if self._attention is None else self._attention.cells
        taken = self._parking.switch(prompt, resident, where, root, resident_root)
        if taken is not None and self._attention is not None:
            self._attention.announce(0, taken.n_tokens, taken.cells)
        return None if taken is None else taken.n_tokens

    def _load_behind(
        self, loader: Loader, match: PrefixMatch, prompt: Tokens, n_present: int, started: float
    ) -> LoadResult | None:
        """Load the stored chunks after the whole chunks that sequence 0 already holds."""
        kept, reads = n_present // CHUNK_TOKENS * CHUNK_TOKENS, ReadTimer()
        runs, predicted_s = self._plan(match.path[kept // CHUNK_TOKENS :], kept)
        if not runs:
            return None
        if self._attention is not None:
            self._attention.announce(kept, match.n_tokens)
        prompt = prompt[: match.n_tokens]
        n_landed = self._land(runs, len(prompt), kept, reads)
        end, n_loaded = kept + n_landed, n_landed
        if end < len(prompt):  # not tried, or a chunk was damaged
            if n_landed:
                runs, _ = self._plan(match.path[end // CHUNK_TOKENS :], end)
            end, n_more = self._load(loader, runs, prompt, end, reads)
            n_loaded += n_more
        n_recomputed = end - kept - n_loaded
        actual_s = time.perf_counter() - started
        if reads.n_bytes:
            self._profile.read(reads.n_bytes, reads.seconds)
        elif n_recomputed == 0:
            self._profile.loaded(n_loaded, actual_s)
        return LoadResult(end, n_loaded, n_recomputed, predicted_s, actual_s)

    def evaluated(self, n_tokens: int, seconds: float) -> None:
        """Record the time of a batch that was evaluated at the end of sequence 0."""
        if n_tokens > 1:  # single tokens are decoding, not recompute
            self._profile.evaluated(n_tokens, self._cells.end() - n_tokens, seconds)

    def _plan(self, chunks: Sequence[Chunk], start: int) -> LoadPlan:
        if all(chunk.ram != ABSENT for chunk in chunks):  # nothing to choose
            n_tokens = count_tokens(chunks)
            return LoadPlan(
                [ChunkRun(chunks, is_loaded=True)], self._profile.load_seconds(n_tokens)
            )
        costs = self._profile.costs() if self._recomputes else None
        return plan_load(chunks, start, self._n_batch, costs)

    def _land(self, runs: Sequence[ChunkRun], n_prompt: int, kept: int, reads: ReadTimer) -> int:
        """Decode chunks directly to their cells, after the first ``kept`` tokens.

        Returns:
            Number of prompt tokens loaded; 0 also if only ``_load`` can load them.
        """
        geometry = self._geometry
        if self._memory is None or geometry is None or not all(run.is_loaded for run in runs):
            return 0
        chunks = [chunk for run in runs for chunk in run.chunks]
        n_cells, n_tokens = count_tokens(chunks), 0
        try:
            blob = map_small_pages(_native.blob_size(geometry, n_cells))
        except OSError:  # the system limits address space
            return 0
        _native.blob_init(geometry, blob, range(kept, kept + n_cells))
        self._cells.truncate(kept)
        row_addresses = self._cells.label_cells(
            self._memory, blob, geometry.n_planes, is_first=not kept
        )
        if row_addresses is not None and _native.landings_fit(geometry, row_addresses, n_cells):
            load = ChunkLoad(self._store.reader, geometry, reads)
            n_sound = load_into_cells(load, chunks, row_addresses, self._workers.load)
            n_sound_tokens = count_tokens(chunks[:n_sound])
            n_tokens = min(n_sound_tokens, n_prompt - kept)
        self._cells.truncate(kept + n_tokens)
        return n_tokens

    def _load(
        self, loader: Loader, runs: Sequence[ChunkRun], prompt: Tokens, kept: int, reads: ReadTimer
    ) -> tuple[int, int]:
        """Replace all cells after the first ``kept`` tokens by the cells of these runs.

        Returns:
            Number of tokens of ``prompt`` in sequence 0, and how many of them were loaded.
        """
        if not runs:
            return kept, 0
        if kept:
            self._cells.truncate(kept)
        end, n_loaded = kept, 0
        steps = loader.steps(runs, kept, reads)
        with self._staging.lock, contextlib.closing(steps):
            for step in steps:
                if isinstance(step, Gap):
                    self._cells.truncate(end)
                    wanted = prompt[end : end + step.n_tokens]
                    n = evaluate(self._ctx, wanted, end, self._load_trouble)
                else:
                    n = step.n_tokens if self._put(step, end) else 0
                    n_loaded += n
                end += n
                if n < step.n_tokens:
                    break
            else:
                self._load_trouble.worked()
        self._cells.finish()
        n_over = max(0, end - len(prompt))  # the last chunk may end otherwise
        self._cells.truncate(end - n_over)
        return end - n_over, n_loaded - n_over

    def _put(self, segment: CellSegment, end: int) -> bool:
        put = self._cells.append if end else self._cells.replace
        if put(segment.blob):
            return True
        self._load_trouble.failed("the engine refused stored cells; they are recomputed")
        return False

    def _open_loader(self, root: bytes) -> Loader | None:
        """Create and return the loader; return None while the cells' layout is unknown."""
        geometry = self._geometry or self._stored_geometry(root)
        if geometry is None:
            return None
        try:
            self._loader = Loader(self._store, self._staging, self._workers, geometry)
        except BudgetError:
            if self._is_measured:
                raise
            self._layout_trouble.failed(
                "the stored layout of this model's cells needs too much memory"
            )
            return None
        self._layout_trouble.worked()
        self._geometry = geometry
        return self._loader

    def _stored_geometry(self, root: bytes) -> KVGeometry | None:
        layout = self._store.layout(root)
        try:
            return None if layout is None else unpack_layout(layout)
        except ValueError as error:
            told = "the stored layout of this model's cells is invalid: %s"
            self._layout_trouble.failed(told, error)
            return None

    def _measure_geometry(self, root: bytes) -> KVGeometry:
        """Read the cells' layout from the blob of one cell, and store it under ``root``."""
        if self._geometry is None or not self._is_measured:
            blob = np.empty(self._cells.size(0, 1), dtype=np.uint8)
            self._cells.read(0, 1, blob)
            geometry, _ = _native.blob_probe(blob)
            if geometry != self._geometry:
                self._geometry, self._loader = geometry, None
            self._is_measured = True
        layout = pack_layout(self._geometry)
        if self._store.layout(root) != layout:
            self._store.set_layout(root, layout)
        return self._geometry


def _runs(indices: Sequence[int], most: int, window: int) -> Iterator[range]:
    """Group consecutive indices into ranges of at most ``most``, each within one window.

    llama.cpp cannot read cells that the sequence's last cell does not see.
    """
    start = previous = indices[0]
    for i in indices[1:]:
        if i != previous + 1 or i - start >= most or i % window == 0:
            yield range(start, previous + 1)
            start = i
        previous = i
    yield range(start, previous + 1)
