"""Encode an engine's cells and put them into the store."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import numpy as np
from llama_cpp import llama_cpp
from numpy.typing import NDArray

from llmaas_hooks import CodecError, Engine
from llmaas_plugins import _native
from llmaas_plugins._native import Codec, KVGeometry, NativeError, Status
from llmaas_plugins.failure_log import FailureLog
from llmaas_plugins.kv_chunks.store.chunk_ids import CHUNK_TOKENS, ChunkId
from llmaas_plugins.kv_chunks.transfer.cell_layout import CellLayout
from llmaas_plugins.kv_chunks.transfer.cells import KVCells
from llmaas_plugins.kv_chunks.transfer.parts import TransferParts
from llmaas_plugins.kv_chunks.transfer.staging import NoRoomNowError, Staging

__all__ = ["ChunkSaver"]

_NO_WINDOW = 1 << 30
_log = logging.getLogger("llmaas.kv_chunks")


class ChunkSaver:
    """Encoder of sequence 0's cells as chunks of the store."""

    def __init__(
        self, engine: Engine, cells: KVCells, layout: CellLayout, parts: TransferParts
    ) -> None:
        """Read ``cells``, the cells of ``engine``."""
        n_window = int(llama_cpp.llama_model_n_swa(engine.model))
        self._window_chunks = n_window // CHUNK_TOKENS or _NO_WINDOW
        self._cells = cells
        self._layout = layout
        self._store = parts.store
        self._codec = parts.codec
        self._staging = parts.staging
        self._failures = FailureLog(_log, logging.WARNING)

    def save(
        self,
        root: bytes,
        ids: Sequence[ChunkId],
        n_tokens: int,
        bits: NDArray[np.int64] | None,
        context_id: str | None,
    ) -> None:
        """Put the chunks into the store that are stored nowhere yet.

        Args:
            root: Root of the chunks' chain.
            ids: Identities of the chunks of sequence 0, from position 0 on.
            n_tokens: Number of tokens in them.
            bits: Bits per value of each chunk, shape ``(n_chunks,)``; None if the codec has none.
            context_id: Name of the persistent context that ends with them, or None.

        Raises:
            BudgetError: The RAM budget is too small for this model; nothing was changed.
        """
        missing = self._store.missing(ids)
        if not missing:
            if not self._layout.is_measured or self._store.layout(root) is None:
                self._layout.measure(root)  # the stored layout may be damaged
            return
        geometry = self._layout.measure(root)
        try:
            step = Staging.BUFFERS * self._staging.segment_chunks(geometry)
        except NoRoomNowError as error:  # the next request tries again
            self._failures.failed("cells are not saved: %s", error)
            return
        with self._staging.used():
            for run in _runs(missing, step, self._window_chunks):
                if not self._save_run(geometry, run, ids, n_tokens, bits, context_id):
                    break
            else:
                self._failures.worked()

    def _save_run(  # noqa: PLR0913, PLR0917  the arguments of save, and a run
        self,
        geometry: KVGeometry,
        run: range,
        ids: Sequence[ChunkId],
        n_tokens: int,
        bits: NDArray[np.int64] | None,
        context_id: str | None,
    ) -> bool:
        start = run.start * CHUNK_TOKENS
        end = min(run.stop * CHUNK_TOKENS, n_tokens)
        blob = self._staging.all_buffers[: _native.blob_size(geometry, end - start)]
        if self._cells.read(start, end, blob) != blob.nbytes:
            self._failures.failed("cannot read cells %d…%d; they are not saved", start, end)
            return False
        try:
            _native.blob_sort(geometry, blob, end - start)  # among parked cells the order is mixed
            _native.blob_check(geometry, blob, range(start, end))
        except CodecError as error:
            self._failures.failed("cells %d…%d are not saved: %s", start, end, error)
            return False
        levels = [_native.CHUNK_BITS] * len(ids) if bits is None else bits.tolist()
        return all(
            self._save_chunk(
                geometry,
                ids[i],
                blob,
                end - start,
                i * CHUNK_TOKENS - start,
                levels[i],
                i == 0,
                context_id,
            )
            for i in run
        )

    def _save_chunk(  # noqa: PLR0913, PLR0917  a chunk and its place
        self,
        geometry: KVGeometry,
        wanted: ChunkId,
        blob: NDArray[np.uint8],
        n_cells: int,
        first: int,
        bits: int,
        is_first: bool,
        context_id: str | None,
    ) -> bool:
        n_tokens = min(CHUNK_TOKENS, n_cells - first)

        def put(codec: Codec) -> bool:
            at = (blob, n_cells, first, n_tokens, wanted.key)
            return self._store.put(
                wanted,
                _native.chunk_bound(geometry, codec, n_tokens, bits),
                lambda out: _native.chunk_encode(geometry, codec, *at, out, bits),
                is_first=is_first,
                context_id=context_id,
            )

        try:
            return put(self._codec)
        except NativeError as error:
            if error.status != Status.EUNSUPPORTED:
                raise
            return put(Codec.RAW)  # the cells contain infinities: keep every bit


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
