"""Stock llama.cpp on one thread with one sequence, and access to its context's taps."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from llmaas_hooks import hookimpl
from llmaas_hooks.native import NativeContext
from llmaas_plugins.model.loading import loaded

__all__ = ["TappedEngine"]


class _Tapped:
    """Plugin that keeps the native context of the engine."""

    @hookimpl
    def llmaas_native_context(self, context: NativeContext) -> None:
        """Keep ``context``."""
        self.context = context


class TappedEngine(contextlib.ExitStack):
    """A model and a context made with llama.cpp's C API, without ``llama_cpp.Llama``."""

    def __init__(self, model: Path, n_ctx: int = 1024) -> None:
        """Set the model file and the context length, which is also the largest batch."""
        super().__init__()
        self._path, self._n_ctx = model, n_ctx

    def __enter__(self) -> Self:
        """Load the model and create the context."""
        super().__enter__()
        with contextlib.ExitStack() as undo:
            undo.push(self)
            self._open()
            undo.pop_all()
        return self

    def _open(self, **settings: Any) -> NativeContext:
        """Load the model, create a context with these further parameters, and return its taps."""
        from llama_cpp import llama_cpp

        from llmaas_plugins import activate

        self._api: Any = llama_cpp
        tapped = _Tapped()
        self.enter_context(activate({"plugins": {}, "on_error": "raise"}, {"tapped": tapped}))
        self._model = self.enter_context(loaded(self._path))
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = self._n_ctx
        params.n_threads = params.n_threads_batch = 1
        for name, value in settings.items():
            setattr(params, name, value)
        self._ctx: Any = llama_cpp.llama_init_from_model(self._model.model, params)
        if not self._ctx:
            raise RuntimeError(f"llama.cpp cannot create a context of {self._n_ctx} tokens")
        self.callback(llama_cpp.llama_free, self._ctx)
        self._memory = llama_cpp.llama_get_memory(self._ctx)
        self._batch = llama_cpp.llama_batch_init(self._n_ctx, 0, 1)
        self.callback(llama_cpp.llama_batch_free, self._batch)
        return tapped.context

    def _decode(self, tokens: Sequence[int], start: int, *, logits: bool) -> None:
        for i, token in enumerate(tokens):
            self._batch.token[i], self._batch.pos[i] = token, start + i
            self._batch.n_seq_id[i], self._batch.seq_id[i][0] = 1, 0
            self._batch.logits[i] = logits
        self._batch.n_tokens = len(tokens)
        status = self._api.llama_decode(self._ctx, self._batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}: {len(tokens)} tokens at {start}")
