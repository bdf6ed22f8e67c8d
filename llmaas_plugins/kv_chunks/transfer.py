"""Chunks between the store and one engine: swap-out ahead of time, and loading."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from llama_cpp import llama_cpp
from numpy.typing import NDArray

from llmaas_hooks import CodecError, Engine, KVRestored, Tokens, common_prefix
from llmaas_plugins import _native
from llmaas_plugins._native import Codec, KVGeometry, NativeError, Status
from llmaas_plugins.kv_chunks.cells import Cells
from llmaas_plugins.kv_chunks.keys import CHUNK_TOKENS, ChunkId, chain, chunk_key
from llmaas_plugins.kv_chunks.loading import Gap, Reads, Segment
from llmaas_plugins.kv_chunks.pipeline import Loader, Workers
from llmaas_plugins.kv_chunks.planning import Plan, Run, plan
from llmaas_plugins.kv_chunks.profiling import Profile
from llmaas_plugins.kv_chunks.recompute import evaluate
from llmaas_plugins.kv_chunks.staging import Staging
from llmaas_plugins.kv_chunks.store import ChunkStore
from llmaas_plugins.kv_chunks.support import window
from llmaas_plugins.kv_chunks.tree import ABSENT, Chunk

__all__ = ["Loaded", "Transfer"]

_ENDLESS = 1 << 30
_log = logging.getLogger("llmaas.kv_chunks")


@dataclass(frozen=True, slots=True)
class Loaded(KVRestored):
    """What a load did; the tokens that it did not load it evaluated, or found in place.

    Attributes:
        n_recomputed: Tokens that it evaluated.
        predicted_s: What the plan promised (LLMS, Eq 4); None if too little was known.
        actual_s: What it took.
    """

    n_recomputed: int
    predicted_s: float | None
    actual_s: float


class Transfer:
    """Moves one engine's chunks."""

    def __init__(  # noqa: PLR0913, PLR0917  wired up in one place
        self,
        engine: Engine,
        store: ChunkStore,
        root: bytes,
        codec: Codec,
        staging: Staging,
        workers: Workers,
    ) -> None:
        """Attach to an engine whose cells have the fingerprint hash ``root``."""
        self._store = store
        self._root = root
        self._codec = codec
        self._staging = staging
        self._workers = workers
        self._ctx = engine.ctx
        self._cells = Cells(engine.ctx)
        self._n_batch = int(llama_cpp.llama_n_batch(engine.ctx))
        n_threads = int(llama_cpp.llama_n_threads_batch(engine.ctx))
        self._profile_key = chunk_key(root, f"profile, {n_threads} threads".encode())
        self._profile = Profile(store.layout(self._profile_key))
        self._window_chunks = window(engine.model) // CHUNK_TOKENS or _ENDLESS
        self._geometry: KVGeometry | None = None
        self._is_learned = False
        self._loader: Loader | None = None

    # -- swap-out -------------------------------------------------------------------------------

    def save(self, tokens: Tokens, context_id: str | None) -> None:
        """Claim the chunks of sequence 0 that are stored nowhere yet.

        Args:
            tokens: What the cells hold, shape ``(n,)``.
            context_id: Persistent context that ends with them, if any.

        Raises:
            BudgetError: The RAM budget is too small for this model; nothing was changed.
        """
        ids = chain(self._root, tokens)
        missing = self._store.missing(ids)
        if missing:
            geometry = self._learn_geometry()
            step = Staging.BUFFERS * self._staging.segment_chunks(geometry)
            with self._staging.lock:
                for run in _runs(missing, step, self._window_chunks):
                    if not self._claim(geometry, run, ids, len(tokens)):
                        break
        self._store.touch(ids)
        if context_id is not None:
            self._store.set_head(context_id, ids)
        if self._profile.has_news:
            self._store.set_layout(self._profile_key, self._profile.to_json())

    def _claim(
        self, geometry: KVGeometry, run: range, ids: Sequence[ChunkId], n_tokens: int
    ) -> bool:
        start = run.start * CHUNK_TOKENS
        end = min(run.stop * CHUNK_TOKENS, n_tokens)
        blob = self._staging.whole[: _native.blob_size(geometry, end - start)]
        if self._cells.read(start, end, blob) != blob.nbytes:
            _log.warning("cannot read cells %d…%d; they are not saved", start, end)
            return False
        try:
            _native.blob_check(geometry, blob, range(start, end))
        except CodecError as error:
            _log.warning("cells %d…%d are not saved: %s", start, end, error)
            return False
        return all(
            self._claim_one(geometry, ids[i], blob, end - start, i * CHUNK_TOKENS - start)
            for i in run
        )

    def _claim_one(
        self,
        geometry: KVGeometry,
        wanted: ChunkId,
        blob: NDArray[np.uint8],
        n_cells: int,
        first: int,
    ) -> bool:
        n_tokens = min(CHUNK_TOKENS, n_cells - first)

        def encode(out: NDArray[np.uint8]) -> int:
            try:
                return _native.chunk_encode(
                    geometry, self._codec, blob, n_cells, first, n_tokens, wanted.key, out
                )
            except NativeError as error:
                if error.status != Status.EUNSUPPORTED:
                    raise
                return _native.chunk_encode(  # infinities: keep every bit instead
                    geometry, Codec.RAW, blob, n_cells, first, n_tokens, wanted.key, out
                )

        bound = _native.chunk_bound(geometry, Codec.RAW, n_tokens)
        bound = max(bound, _native.chunk_bound(geometry, self._codec, n_tokens))
        return self._store.put(wanted, bound, encode, is_first=wanted.parent == self._root)

    # -- load -----------------------------------------------------------------------------------

    def restore(self, prompt: Tokens, resident: Tokens) -> Loaded | None:
        """Bring in the stored prefix of ``prompt`` if it is longer than what is resident.

        Some of it may be evaluated here, where that is faster or nothing is stored.

        Args:
            prompt: The whole prompt, shape ``(n,)``.
            resident: What sequence 0 holds, shape ``(m,)``.

        Raises:
            BudgetError: The RAM budget is too small for this model; nothing was changed.
        """
        match = self._store.match(self._root, prompt)
        n_common = common_prefix(prompt, resident)
        loader = self._loader or self._open_loader()
        if match.n_tokens <= n_common or loader is None:
            return None
        kept = n_common // CHUNK_TOKENS * CHUNK_TOKENS
        started, reads = time.perf_counter(), Reads()
        runs, predicted_s = self._plan(match.path[kept // CHUNK_TOKENS :], kept)
        if not runs:
            return None
        end, n_loaded = self._load(loader, runs, prompt[: match.n_tokens], kept, reads)
        n_recomputed = end - kept - n_loaded
        actual_s = time.perf_counter() - started
        if reads.n_bytes:
            self._profile.read(reads.n_bytes, reads.seconds)
        elif n_recomputed == 0:
            self._profile.loaded(n_loaded, actual_s)
        return Loaded(end, n_loaded, n_recomputed, predicted_s, actual_s)

    def evaluated(self, n_tokens: int, seconds: float) -> None:
        """The engine evaluated a batch at the end of sequence 0."""
        if n_tokens > 1:  # single tokens are decoding, not recompute
            self._profile.evaluated(n_tokens, self._cells.end() - n_tokens, seconds)

    def _plan(self, chunks: Sequence[Chunk], start: int) -> Plan:
        if all(chunk.ram != ABSENT for chunk in chunks):  # nothing to choose
            n_tokens = sum(chunk.n_tokens for chunk in chunks)
            return Plan([Run(chunks, is_loaded=True)], self._profile.load_seconds(n_tokens))
        return plan(chunks, start, self._n_batch, self._profile.costs())

    def _load(
        self, loader: Loader, runs: Sequence[Run], prompt: Tokens, kept: int, reads: Reads
    ) -> tuple[int, int]:
        """Bring in the runs behind the first ``kept`` tokens, in place of all else.

        Returns:
            How many tokens of ``prompt`` sequence 0 holds then, and how many of them were loaded.
        """
        if kept:
            self._cells.truncate(kept)
        end, n_loaded = kept, 0
        steps = loader.steps(runs, kept, reads)
        with self._staging.lock, contextlib.closing(steps):
            for step in steps:
                if isinstance(step, Gap):
                    self._cells.truncate(end)
                    n = evaluate(self._ctx, prompt[end : end + step.n_tokens], end)
                else:
                    n = step.n_tokens if self._put(step, end) else 0
                    n_loaded += n
                end += n
                if n < step.n_tokens:
                    break
        self._cells.finish()
        n_over = max(0, end - len(prompt))  # the last chunk may only begin like the prompt
        self._cells.truncate(end - n_over)
        return end - n_over, n_loaded - n_over

    def _put(self, segment: Segment, end: int) -> bool:
        put = self._cells.append if end else self._cells.replace
        if put(segment.blob):
            return True
        _log.warning("the engine refused stored cells; they are recomputed")
        return False

    def _open_loader(self) -> Loader | None:
        """The loader; None as long as nobody knows the cells' layout."""
        geometry = self._geometry or self._stored_geometry()
        if geometry is not None:
            self._geometry = geometry
            self._loader = Loader(self._store, self._staging, self._workers, geometry)
        return self._loader

    def _stored_geometry(self) -> KVGeometry | None:
        layout = self._store.layout(self._root)
        try:
            return None if layout is None else KVGeometry.from_json(json.loads(layout))
        except (ValueError, OverflowError) as error:
            _log.warning("the stored layout of this model's cells is unusable: %s", error)
            return None

    def _learn_geometry(self) -> KVGeometry:
        """Layout of this engine's cells, read off the blob of one of them."""
        if self._geometry is None or not self._is_learned:
            blob = np.empty(self._cells.size(0, 1), dtype=np.uint8)
            self._cells.read(0, 1, blob)
            geometry, _ = _native.blob_probe(blob)
            if geometry != self._geometry:
                self._geometry, self._loader = geometry, None
                self._store.set_layout(self._root, json.dumps(geometry.to_json()))
            self._is_learned = True
        return self._geometry


def _runs(indices: Sequence[int], most: int, window: int) -> Iterator[range]:
    """Consecutive indices, grouped into ranges of ``most`` at most, each within one window.

    llama.cpp reads no cells that a sequence's last one cannot see.
    """
    start = previous = indices[0]
    for i in indices[1:]:
        if i != previous + 1 or i - start >= most or i % window == 0:
            yield range(start, previous + 1)
            start = i
        previous = i
    yield range(start, previous + 1)
