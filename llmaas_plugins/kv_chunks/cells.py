"""Ranges of a context's cells, through the public sequence API and one scratch sequence.

``llama_state_seq_get_data`` and ``_set_data`` exchange a blob for a whole sequence. A range is
read by labelling its cells with the scratch sequence; a range is written by loading a blob into
the scratch sequence and labelling those cells with sequence 0. Nothing is copied by labelling.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from llama_cpp import llama_cpp
from numpy.typing import NDArray

from llmaas_hooks import CellMemory
from llmaas_plugins.kv_chunks.support import SCRATCH_SEQUENCE

__all__ = ["Cells"]

_APP = 0
_Bytes = ctypes.POINTER(ctypes.c_uint8)


class Cells:
    """The KV cells of one context. Call it only while the engine is yours."""

    def __init__(self, ctx: int) -> None:
        """Attach to a context."""
        self._ctx: Any = ctx
        self._memory = llama_cpp.llama_get_memory(ctx)

    def read(self, start: int, end: int, blob: NDArray[np.uint8]) -> int:
        """Copy the cells at positions ``[start, end)`` to ``blob``; bytes written, 0 on failure."""
        llama_cpp.llama_memory_seq_cp(self._memory, _APP, SCRATCH_SEQUENCE, start, end)
        try:
            pointer = ctypes.cast(blob.ctypes.data, _Bytes)
            return int(
                llama_cpp.llama_state_seq_get_data(
                    self._ctx, pointer, blob.nbytes, SCRATCH_SEQUENCE
                )
            )
        finally:
            self._clear_scratch()

    def size(self, start: int, end: int) -> int:
        """Bytes that ``read`` needs for ``[start, end)``."""
        llama_cpp.llama_memory_seq_cp(self._memory, _APP, SCRATCH_SEQUENCE, start, end)
        try:
            return int(llama_cpp.llama_state_seq_get_size(self._ctx, SCRATCH_SEQUENCE))
        finally:
            self._clear_scratch()

    def append(self, blob: NDArray[np.uint8]) -> bool:
        """Load cells from a blob and give them to sequence 0; False when the engine refuses it.

        They stay labelled with the scratch sequence too, until ``finish`` or the next ``append``:
        loading into a sequence empties it first.
        """
        if not self._load(blob, SCRATCH_SEQUENCE):
            return False
        llama_cpp.llama_memory_seq_cp(self._memory, SCRATCH_SEQUENCE, _APP, -1, -1)
        return True

    def replace(self, blob: NDArray[np.uint8]) -> bool:
        """Load cells from a blob in place of all of sequence 0's; False when refused."""
        return self._load(blob, _APP)

    def land(
        self, memory: CellMemory, blob: NDArray[np.uint8], n_planes: int, *, is_first: bool
    ) -> NDArray[np.uint64] | None:
        """Like ``replace`` if it ``is_first``, or else ``append``, but for the rows of the blob.

        Returns:
            Where these belong (``CellMemory.land``); None when the engine refuses, or its free
            cells are too scattered: sequence 0 ends where the blob begins then.
        """
        sequence = _APP if is_first else SCRATCH_SEQUENCE
        landings = memory.land(blob, sequence, n_planes)
        if landings is None:
            llama_cpp.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        elif not is_first:
            llama_cpp.llama_memory_seq_cp(self._memory, SCRATCH_SEQUENCE, _APP, -1, -1)
            self._clear_scratch()
        return landings

    def finish(self) -> None:
        """Empty the scratch sequence after the last ``append``."""
        self._clear_scratch()

    def end(self) -> int:
        """Position behind the last one of sequence 0."""
        return int(llama_cpp.llama_memory_seq_pos_max(self._memory, _APP)) + 1

    def truncate(self, n_tokens: int) -> None:
        """Drop the cells at positions ``n_tokens`` and beyond."""
        llama_cpp.llama_memory_seq_rm(self._memory, _APP, n_tokens, -1)

    def _load(self, blob: NDArray[np.uint8], sequence: int) -> bool:
        pointer = ctypes.cast(blob.ctypes.data, _Bytes)
        n_read = llama_cpp.llama_state_seq_set_data(self._ctx, pointer, blob.nbytes, sequence)
        return int(n_read) == blob.nbytes

    def _clear_scratch(self) -> None:
        llama_cpp.llama_memory_seq_rm(self._memory, SCRATCH_SEQUENCE, -1, -1)
