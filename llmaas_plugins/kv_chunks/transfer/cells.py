"""Read and write ranges of a context's KV cells through llama.cpp's public sequence API.

``llama_state_seq_get_data`` and ``_set_data`` only handle a whole sequence, as a blob. To read a
range, label its cells with a scratch sequence and read that sequence. To write a range, load a blob
into the scratch sequence and label its cells with sequence 0. Labeling copies no data.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from llama_cpp import llama_cpp
from numpy.typing import NDArray

from llmaas_hooks import CellMemory
from llmaas_plugins import _native
from llmaas_plugins._native import KVGeometry
from llmaas_plugins.kv_chunks.parking.sequences import SCRATCH_SEQUENCE
from llmaas_plugins.kv_chunks.store.huge_pages import map_small_pages

__all__ = ["KVCells"]

_APP = 0
_Bytes = ctypes.POINTER(ctypes.c_uint8)


class KVCells:
    """The KV cells of one context. Use it only while no other thread uses the engine."""

    def __init__(self, ctx: int) -> None:
        """Attach to a context."""
        self._ctx: Any = ctx
        self._memory = llama_cpp.llama_get_memory(ctx)

    def read(self, start: int, end: int, blob: NDArray[np.uint8]) -> int:
        """Copy the cells at positions ``[start, end)`` to ``blob``.

        Returns:
            Number of bytes written; 0 on failure.
        """
        try:
            self._label_scratch(start, end)
            pointer = ctypes.cast(blob.ctypes.data, _Bytes)
            return int(
                llama_cpp.llama_state_seq_get_data(
                    self._ctx, pointer, blob.nbytes, SCRATCH_SEQUENCE
                )
            )
        finally:
            self._clear_scratch()

    def size(self, start: int, end: int) -> int:
        """Return the bytes that ``read`` needs for positions ``[start, end)``."""
        try:
            self._label_scratch(start, end)
            return int(llama_cpp.llama_state_seq_get_size(self._ctx, SCRATCH_SEQUENCE))
        finally:
            self._clear_scratch()

    def append(self, blob: NDArray[np.uint8], start: int) -> bool:
        """Load cells from a blob and give them to sequence 0; return False if the engine refuses.

        The cells also keep the scratch label until ``finish`` or the next ``append``, because
        loading into a sequence empties that sequence first.

        Args:
            blob: Blob to load.
            start: Position of its first cell; cells before it stay as they are.
        """
        if not self._load(blob, SCRATCH_SEQUENCE):
            return False
        llama_cpp.llama_memory_seq_cp(self._memory, SCRATCH_SEQUENCE, _APP, start, -1)
        return True

    def replace(self, blob: NDArray[np.uint8]) -> bool:
        """Replace sequence 0 by the cells of a blob; return False if the engine refuses."""
        return self._load(blob, _APP)

    def label_cells(
        self, memory: CellMemory, blob: NDArray[np.uint8], n_planes: int, start: int
    ) -> NDArray[np.uint64] | None:
        """Label cells for a blob as ``replace`` or ``append`` would, but leave its rows unwritten.

        Args:
            memory: Memory of the cells.
            blob: Blob of which only the headers are read.
            n_planes: Number of K and V planes in the blob.
            start: Position of the blob's first cell; 0 to replace sequence 0.

        Returns:
            Addresses for the rows (``CellMemory.land``). None if the engine refuses or its free
            cells are too scattered; sequence 0 then ends where the blob begins.
        """
        sequence = SCRATCH_SEQUENCE if start else _APP
        row_addresses = memory.land(blob, sequence, n_planes)
        if row_addresses is None:
            llama_cpp.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        elif start:
            llama_cpp.llama_memory_seq_cp(self._memory, SCRATCH_SEQUENCE, _APP, start, -1)
            self._clear_scratch()
        return row_addresses

    def label_scratch(self, memory: CellMemory, geometry: KVGeometry, positions: range) -> bool:
        """Give free cells to the scratch sequence, unwritten; return False if that is impossible.

        Args:
            memory: Memory of the cells.
            geometry: Layout of the cells.
            positions: Positions of these cells.
        """
        try:
            blob = map_small_pages(_native.blob_size(geometry, len(positions)))
        except OSError:  # the system limits address space
            return False
        _native.blob_init(geometry, blob, positions)
        if memory.land(blob, SCRATCH_SEQUENCE, geometry.n_planes) is not None:
            return True
        self._clear_scratch()
        return False

    def finish(self) -> None:
        """Empty the scratch sequence after the last ``append``."""
        self._clear_scratch()

    def end(self) -> int:
        """Return the position after the last one of sequence 0."""
        return int(llama_cpp.llama_memory_seq_pos_max(self._memory, _APP)) + 1

    def truncate(self, n_tokens: int) -> None:
        """Drop the cells at positions ``n_tokens`` and beyond."""
        llama_cpp.llama_memory_seq_rm(self._memory, _APP, n_tokens, -1)

    def _load(self, blob: NDArray[np.uint8], sequence: int) -> bool:
        pointer = ctypes.cast(blob.ctypes.data, _Bytes)
        n_read = llama_cpp.llama_state_seq_set_data(self._ctx, pointer, blob.nbytes, sequence)
        return int(n_read) == blob.nbytes

    def _label_scratch(self, start: int, end: int) -> None:
        """Label exactly these cells of sequence 0; Ctrl-C may have left older labels."""
        self._clear_scratch()
        llama_cpp.llama_memory_seq_cp(self._memory, _APP, SCRATCH_SEQUENCE, start, end)

    def _clear_scratch(self) -> None:
        llama_cpp.llama_memory_seq_rm(self._memory, SCRATCH_SEQUENCE, -1, -1)
