"""Outputs of an encoder for word pieces, computed by llama.cpp."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import llama_cpp
from numpy.ctypeslib import as_array
from numpy.typing import NDArray

from llmaas_hooks import ConfigError, LlmaasError
from llmaas_hooks.own_models import own_models

__all__ = ["Outputs"]


class Outputs:
    """Context that reads a window at a time. Call ``close`` after use; one thread at a time."""

    def __init__(self, path: Path, n_positions: int, n_threads: int) -> None:
        """Load an encoder.

        Args:
            path: GGUF file of the encoder.
            n_positions: Most pieces of a window.
            n_threads: Number of threads.

        Raises:
            ConfigError: llama.cpp cannot load the file.
            LlmaasError: There is no memory for the context.
        """
        with own_models():
            self._model = _loaded(path)
            self._ctx = _context(self._model, n_positions, n_threads)
        if self._ctx is None:
            llama_cpp.llama_model_free(self._model)
            raise LlmaasError("no memory for the encoder's context. Close other programs.")
        self._n_threads = n_threads
        self._n_embd = int(llama_cpp.llama_model_n_embd(self._model))
        self._batch = llama_cpp.llama_batch_init(n_positions, 0, 1)
        self._ids = as_array(self._batch.token, shape=(n_positions,))
        self._fill(n_positions)

    def use_threads(self, n_threads: int) -> None:
        """Compute with another number of threads from now on."""
        if n_threads != self._n_threads:
            llama_cpp.llama_set_n_threads(self._ctx, n_threads, n_threads)
            self._n_threads = n_threads

    def of(self, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return the last layer's outputs of a window, shape ``(n, n_embd)``.

        They are valid until the next call.

        Raises:
            LlmaasError: llama.cpp reports an error.
        """
        self._ids[: len(ids)] = ids
        self._batch.n_tokens = len(ids)
        status = llama_cpp.llama_encode(self._ctx, self._batch)
        if status:
            raise LlmaasError(f"llama_encode returned {status} while words were scored")
        found = llama_cpp.llama_get_embeddings(self._ctx)
        return as_array(found, shape=(len(ids), self._n_embd))

    def close(self) -> None:
        """Free the context and the model; closing them again does nothing."""
        if self._ctx is not None:
            llama_cpp.llama_batch_free(self._batch)
            llama_cpp.llama_free(self._ctx)
            llama_cpp.llama_model_free(self._model)
            self._ctx = None

    def _fill(self, n_positions: int) -> None:
        """Set everything of the batch that is the same in all windows."""
        batch = self._batch
        as_array(batch.pos, shape=(n_positions,))[:] = np.arange(n_positions)
        as_array(batch.n_seq_id, shape=(n_positions,))[:] = 1
        as_array(batch.logits, shape=(n_positions,))[:] = 1
        for i in range(n_positions):
            batch.seq_id[i][0] = ctypes.c_int32(0)


# -- inside --------------------------------------------------------------------------------------


def _loaded(path: Path) -> Any:
    """Return a ``llama_model``.

    Raises:
        ConfigError: llama.cpp cannot load the file.
    """
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
    if model is None:
        raise ConfigError(
            f"llama.cpp cannot load the encoder {path}. `llmaas prompts learn` makes a new one."
        )
    return model


def _context(model: Any, n_positions: int, n_threads: int) -> Any:
    """Return a ``llama_context`` that gives the outputs of all pieces, or None."""
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = n_positions
    params.n_threads = params.n_threads_batch = n_threads
    params.embeddings = True
    params.pooling_type = llama_cpp.LLAMA_POOLING_TYPE_NONE
    params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED  # takes half of the time
    return llama_cpp.llama_init_from_model(model, params)
