"""Memory of a context's KV cells, as plugins see it (implements ``llmaas_hooks.native``)."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
from llama_cpp import llama_cpp
from numpy.typing import NDArray

from llmaas_patches.native.library import Library

if TYPE_CHECKING:
    from llmaas_patches.native.backend_context import BackendContext

__all__ = ["Cells"]

_LANDING_FIELDS = 4
_SET_DATA = ctypes.cast(llama_cpp._lib.llama_state_seq_set_data, ctypes.c_void_p).value


class Cells:
    """Memory of a context's KV cells."""

    def __init__(self, context: BackendContext, library: Library) -> None:
        """Attach to ``context``."""
        self._context, self._library = context, library

    @property
    def n(self) -> int:
        """Number of cells; 0 if their memory is not known."""
        return int(self._memory().n_cells)

    @property
    def n_bytes(self) -> int:
        """Bytes of all cells."""
        return int(self._memory().n_bytes)

    @property
    def touched_bytes(self) -> int:
        """Bytes of the cells that may hold memory."""
        return int(self._memory().n_touched)

    def release(self) -> bool:
        """Release the memory of all cells; return whether that was possible."""
        with self._context.alive() as engine:
            return bool(self._library.lib.llmaas_engine_release_cells(engine) == 0)

    def land(
        self, blob: NDArray[np.uint8], sequence: int, n_landings: int
    ) -> NDArray[np.uint64] | None:
        """Label cells for a blob; return the addresses of its rows, or None on failure."""
        ffi, lib = self._library.ffi, self._library.lib
        landings = np.zeros((n_landings, _LANDING_FIELDS), dtype=np.uint64)
        with self._context.alive() as engine:
            status = lib.llmaas_engine_land(
                engine,
                ffi.cast("llmaas_set_data", _SET_DATA),
                ffi.cast("void *", self._context.ctx),
                sequence,
                ffi.cast("uint8_t *", blob.ctypes.data),
                blob.nbytes,
                ffi.cast("llmaas_landing *", landings.ctypes.data),
                n_landings,
            )
        return landings if status == 0 else None

    def _memory(self) -> Any:
        with self._context.alive() as engine:
            return self._library.lib.llmaas_engine_cells(engine)
