"""A bare llama.cpp context that many contexts share as sequences."""

from __future__ import annotations

import ctypes
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from llama_cpp import llama_cpp
from llama_cpp._logger import set_verbose
from numpy.typing import NDArray

from llmaas_patches.internals import real_n_ctx
from llmaas_plugins import _native
from llmaas_plugins._native import KVGeometry

__all__ = ["BLOCK_CELLS", "SequenceEngine", "learn_geometry", "token_bytes"]

_Bytes = ctypes.POINTER(ctypes.c_uint8)
BLOCK_CELLS = 256
_WARM_TOKENS = 16


class SequenceEngine:
    """A model and a context with flash attention; all sequences share one KV cache.

    Attributes:
        n_cells: Number of cells in the cache.
        geometry: Layout of the cells.
    """

    def __init__(
        self, model: Path, n_cells: int, n_sequences: int, cell_type: int = llama_cpp.GGML_TYPE_F16
    ) -> None:
        """Load ``model`` and evaluate a few tokens, so that all memory is allocated.

        Args:
            model: GGUF file.
            n_cells: Highest number of cells; rounded down to a number that llama.cpp supports.
            n_sequences: Number of sequences for the caller, from 0; the engine uses one more.
            cell_type: Type of keys and values.
        """
        set_verbose(False)
        llama_cpp.llama_backend_init()
        self._model: Any = llama_cpp.llama_model_load_from_file(
            str(model).encode(), llama_cpp.llama_model_default_params()
        )
        if self._model is None:
            raise RuntimeError(f"llama.cpp could not load {model}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = n_cells // BLOCK_CELLS * BLOCK_CELLS
        params.n_seq_max, params.kv_unified = n_sequences + 1, True
        params.n_batch = params.n_ubatch = 512
        params.flash_attn_type = 1
        params.type_k = params.type_v = cell_type
        params.n_threads, params.n_threads_batch = _threads()
        self.ctx: Any = llama_cpp.llama_init_from_model(self._model, params)
        if self.ctx is None:
            raise RuntimeError(f"llama.cpp could not make a context of {params.n_ctx} cells")
        self.n_cells = real_n_ctx(self.ctx)
        self._scratch = n_sequences
        self._memory = llama_cpp.llama_get_memory(self.ctx)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self._model)
        )
        self.decode(_WARM_TOKENS)
        self.geometry = learn_geometry(self.ctx)
        self.remove(0)

    def decode(self, n_tokens: int) -> None:
        """Evaluate ``n_tokens`` random tokens at the end of sequence 0, in ``Llama``'s batches."""
        tokens = np.random.default_rng(n_tokens).integers(300, self._vocab_size, n_tokens)
        for start in range(0, n_tokens, 512):
            part = tokens[start : start + 512].tolist()
            values = (llama_cpp.llama_token * len(part))(*part)
            batch = llama_cpp.llama_batch_get_one(values, len(part))
            status = llama_cpp.llama_decode(self.ctx, batch)
            if status != 0:
                raise RuntimeError(f"llama_decode of {len(part)} tokens returned {status}")

    def put(self, sequence: int, blob: NDArray[np.uint8]) -> None:
        """Append a blob's cells to a sequence; call ``finish`` after the last blob."""
        pointer = ctypes.cast(blob.ctypes.data, _Bytes)
        n_read = llama_cpp.llama_state_seq_set_data(self.ctx, pointer, blob.nbytes, self._scratch)
        if n_read != blob.nbytes:
            raise RuntimeError(f"llama.cpp took {n_read} of {blob.nbytes} bytes of cells")
        llama_cpp.llama_memory_seq_cp(self._memory, self._scratch, sequence, -1, -1)

    def finish(self) -> None:
        """Empty the scratch sequence, which still labels the cells of every ``put``."""
        llama_cpp.llama_memory_seq_rm(self._memory, self._scratch, -1, -1)

    def read(self, sequence: int, start: int, end: int, out: NDArray[np.uint8]) -> int:
        """Copy a sequence's cells of positions ``[start, end)`` to ``out``; return their bytes."""
        llama_cpp.llama_memory_seq_cp(self._memory, sequence, self._scratch, start, end)
        pointer = ctypes.cast(out.ctypes.data, _Bytes)
        n_bytes = llama_cpp.llama_state_seq_get_data(self.ctx, pointer, out.nbytes, self._scratch)
        self.finish()
        if n_bytes == 0:
            raise RuntimeError(f"llama.cpp gave no cells {start}…{end} of sequence {sequence}")
        return int(n_bytes)

    def blob_bytes(self, n_tokens: int) -> int:
        """Return the bytes of ``n_tokens`` cells in the format of ``read``."""
        return _native.blob_size(self.geometry, n_tokens)

    def remove(self, sequence: int, start: int = 0) -> None:
        """Drop a sequence's cells from position ``start`` on."""
        llama_cpp.llama_memory_seq_rm(self._memory, sequence, start, -1)

    def close(self) -> None:
        """Free the context and the model."""
        llama_cpp.llama_free(self.ctx)
        llama_cpp.llama_model_free(self._model)


def _threads() -> tuple[int, int]:
    """Return the numbers of threads for single tokens and for batches, as ``Llama`` sets them."""
    n_cores = multiprocessing.cpu_count()
    return max(n_cores // 2, 1), n_cores


def token_bytes(model: Path) -> int:
    """Return the bytes of one f16 cell, computed from the file, without an engine."""
    fields = GGUFReader(model).fields
    arch = fields["general.architecture"].contents()

    def number(name: str) -> int:
        return int(fields[f"{arch}.{name}"].contents())

    head = number("embedding_length") // number("attention.head_count")
    return 2 * 2 * head * number("attention.head_count_kv") * number("block_count")


def learn_geometry(ctx: Any) -> KVGeometry:
    """Return the layout of a context's cells, read from sequence 0, which must have some."""
    n_bytes = llama_cpp.llama_state_seq_get_size(ctx, 0)
    blob = np.zeros(n_bytes, dtype=np.uint8)
    llama_cpp.llama_state_seq_get_data(ctx, ctypes.cast(blob.ctypes.data, _Bytes), n_bytes, 0)
    return _native.blob_probe(blob)[0]
