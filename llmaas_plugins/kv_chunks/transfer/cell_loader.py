"""Load stored chunks into an engine's cells, and recompute the others (LLMS §3.3)."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from llama_cpp import llama_cpp

from llmaas_hooks import BudgetError, Engine, KVRestored, Tokens
from llmaas_plugins import _native
from llmaas_plugins._native import KVGeometry
from llmaas_plugins.failure_log import FailureLog
from llmaas_plugins.kv_chunks.store.chunk_ids import CHUNK_TOKENS
from llmaas_plugins.kv_chunks.store.huge_pages import map_small_pages
from llmaas_plugins.kv_chunks.store.tree import ABSENT, Chunk, PrefixMatch, count_tokens
from llmaas_plugins.kv_chunks.transfer.cell_layout import CellLayout
from llmaas_plugins.kv_chunks.transfer.cells import KVCells
from llmaas_plugins.kv_chunks.transfer.chunk_load import CellSegment, ChunkLoad, Gap, ReadTimer
from llmaas_plugins.kv_chunks.transfer.cost_profile import CostProfile
from llmaas_plugins.kv_chunks.transfer.direct_load import load_into_cells
from llmaas_plugins.kv_chunks.transfer.parts import TransferParts
from llmaas_plugins.kv_chunks.transfer.pipeline import SegmentLoader
from llmaas_plugins.kv_chunks.transfer.planning import ChunkRun, LoadPlan, plan_load
from llmaas_plugins.kv_chunks.transfer.recompute import evaluate
from llmaas_plugins.kv_chunks.transfer.staging import NoRoomNowError

__all__ = ["CellLoader", "LoadResult"]

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


class CellLoader:
    """Loader of stored chunks into sequence 0 of one engine."""

    def __init__(
        self,
        engine: Engine,
        cells: KVCells,
        layout: CellLayout,
        profile: CostProfile,
        parts: TransferParts,
    ) -> None:
        """Write to ``cells``, the cells of ``engine``, as fast as ``profile`` allows."""
        self._ctx = engine.ctx
        self._n_batch = int(llama_cpp.llama_n_batch(engine.ctx))
        self._cells = cells
        self._layout = layout
        self._profile = profile
        self._store = parts.store
        self._attention = parts.attention
        self._memory = parts.memory
        self._recomputes = parts.recomputes
        self._staging = parts.staging
        self._workers = parts.workers
        self._segments: SegmentLoader | None = None
        self._opened_geometry: KVGeometry | None = None
        self._failures = FailureLog(_log, logging.WARNING)

    def open(self, root: bytes) -> bool:
        """Allocate transfer buffers; return False if nothing can be loaded now.

        That is so while the layout of the cells is unknown, and while the process leaves no room
        to the buffers.

        Args:
            root: Root under which the layout may be stored.

        Raises:
            BudgetError: The RAM budget is too small for this model.
        """
        if self._segments is not None and self._opened_geometry is self._layout.geometry:
            return True
        geometry = self._layout.find(root)
        if geometry is None:
            return False
        try:
            self._segments = SegmentLoader(self._store, self._staging, self._workers, geometry)
        except NoRoomNowError as error:
            self._failures.failed("contexts are not loaded: %s", error)
            return False
        except BudgetError:
            if self._layout.is_measured:
                raise
            self._layout.reject()
            return False
        self._failures.worked()
        self._opened_geometry = geometry
        self._layout.use(geometry)
        return True

    def load(
        self, match: PrefixMatch, prompt: Tokens, n_present: int, started: float
    ) -> LoadResult | None:
        """Load the stored chunks after the whole chunks that sequence 0 already holds.

        Args:
            match: Stored chunks of the prompt.
            prompt: The whole prompt, shape ``(n,)``.
            n_present: Number of its leading tokens that sequence 0 holds.
            started: Time at which the request began to restore, by ``time.perf_counter``.

        Returns:
            Result of the load; None if the plan is to evaluate everything. ``open`` must have
            returned True.
        """
        kept, reads = n_present // CHUNK_TOKENS * CHUNK_TOKENS, ReadTimer()
        runs, predicted_s = self.plan(match, n_present)
        if not runs:
            return None
        if self._attention is not None:
            self._attention.announce(kept, match.n_tokens)
        prompt = prompt[: match.n_tokens]
        n_direct = self._load_directly(runs, len(prompt), kept, reads)
        end, n_loaded = kept + n_direct, n_direct
        if end < len(prompt):  # not tried, or a chunk was damaged
            if n_direct:
                runs, _ = self._plan(match.path[end // CHUNK_TOKENS :], end)
            end, n_more = self._load_in_segments(runs, prompt, end, reads)
            n_loaded += n_more
        n_recomputed = end - kept - n_loaded
        actual_s = time.perf_counter() - started
        if reads.n_bytes:
            self._profile.read(reads.n_bytes, reads.seconds)
        elif n_recomputed == 0:
            self._profile.loaded(n_loaded, actual_s)
        return LoadResult(end, n_loaded, n_recomputed, predicted_s, actual_s)

    def plan(self, match: PrefixMatch, n_present: int) -> LoadPlan:
        """Return the plan of ``load``, which has the same arguments."""
        first = n_present // CHUNK_TOKENS
        return self._plan(match.path[first:], first * CHUNK_TOKENS)

    def _plan(self, chunks: Sequence[Chunk], start: int) -> LoadPlan:
        if all(chunk.ram != ABSENT for chunk in chunks):  # nothing to choose
            n_tokens = count_tokens(chunks)
            return LoadPlan(
                [ChunkRun(chunks, is_loaded=True)], self._profile.load_seconds(n_tokens)
            )
        costs = self._profile.costs() if self._recomputes else None
        return plan_load(chunks, start, self._n_batch, costs)

    def _load_directly(
        self, runs: Sequence[ChunkRun], n_prompt: int, kept: int, reads: ReadTimer
    ) -> int:
        """Decode chunks directly to their cells, after the first ``kept`` tokens.

        Returns:
            Number of prompt tokens loaded; 0 also if only ``_load_in_segments`` can load them.
        """
        geometry = self._layout.geometry
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
        row_addresses = self._cells.label_cells(self._memory, blob, geometry.n_planes, kept)
        if row_addresses is not None and _native.landings_fit(geometry, row_addresses, n_cells):
            load = ChunkLoad(self._store.reader, geometry, reads)
            n_sound = load_into_cells(load, chunks, row_addresses, self._workers.load)
            n_sound_tokens = count_tokens(chunks[:n_sound])
            n_tokens = min(n_sound_tokens, n_prompt - kept)
            self._failures.worked()
        self._cells.truncate(kept + n_tokens)
        return n_tokens

    def _load_in_segments(
        self, runs: Sequence[ChunkRun], prompt: Tokens, kept: int, reads: ReadTimer
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
        assert self._segments is not None
        steps = self._segments.steps(runs, kept, reads)
        with self._staging.used(), contextlib.closing(steps):
            for step in steps:
                if isinstance(step, Gap):
                    self._cells.truncate(end)
                    wanted = prompt[end : end + step.n_tokens]
                    n = evaluate(self._ctx, wanted, end, self._failures)
                else:
                    n = step.n_tokens if self._put(step, end) else 0
                    n_loaded += n
                end += n
                if n < step.n_tokens:
                    break
            else:
                self._failures.worked()
        self._cells.finish()
        n_over = max(0, end - len(prompt))  # the last chunk may end otherwise
        self._cells.truncate(end - n_over)
        return end - n_over, n_loaded - n_over

    def _put(self, segment: CellSegment, end: int) -> bool:
        cells, blob = self._cells, segment.blob
        if cells.append(blob, end) if end else cells.replace(blob):
            return True
        self._failures.failed("the engine refused stored cells; they are recomputed")
        return False
