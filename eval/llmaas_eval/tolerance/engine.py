"""Engine whose cells can be read, changed and put back, and whose attention is measured."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.tapped import TappedEngine
from llmaas_hooks.native import NativeContext
from llmaas_plugins.model.forward import log_softmax

__all__ = ["Continuation", "Engine", "Prefilled"]

_Bytes = ctypes.POINTER(ctypes.c_uint8)
_ATTENTION = b"kqv_out-"
"""Prefix of llama.cpp's names for the output of a layer's attention; the layer's number follows."""
_TILE = 64
"""Smallest number of tokens for which llama.cpp's flash attention uses tiles, 8× as fast."""


class Prefilled(NamedTuple):
    """A context after the engine evaluated it.

    Attributes:
        blob: Cells, as ``llama_state_seq_get_data`` writes them.
        attention: Summed attention to each position; shape ``(n_tokens,)``.
        seen: Number of scores in each of these sums; shape ``(n_tokens,)``.
    """

    blob: NDArray[np.uint8]
    attention: NDArray[np.float64]
    seen: NDArray[np.uint64]


class Continuation(NamedTuple):
    """Output of the engine for the tokens after a context.

    Attributes:
        log_p: Log probabilities after each token; shape ``(n_tokens, n_vocab)``.
        attention: Output of attention; shape ``(n_layer, n_tokens, n_embd)``.
    """

    log_p: NDArray[np.float64]
    attention: NDArray[np.float32]


class _Watch:
    """Copies of the attention's output, taken through llama.cpp's public callback."""

    def __init__(self) -> None:
        import llama_cpp

        ggml = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so.0"))
        self._name, self._data, self._size = (
            ggml.ggml_get_name,
            ggml.ggml_get_data,
            ggml.ggml_nbytes,
        )
        for function, result in (
            (self._name, ctypes.c_char_p),
            (self._data, ctypes.c_void_p),
            (self._size, ctypes.c_size_t),
        ):
            function.argtypes, function.restype = [ctypes.c_void_p], result
        self.is_on = False
        self.seen: list[NDArray[np.float32]] = []
        self.callback = llama_cpp.ggml_backend_sched_eval_callback(self._call)

    def _call(self, tensor: int, is_asked: bool, _: Any) -> bool:
        if is_asked:
            return self.is_on and self._name(tensor).startswith(_ATTENTION)
        raw = ctypes.string_at(self._data(tensor), self._size(tensor))
        self.seen.append(np.frombuffer(raw, np.float32))
        return True


class Engine(TappedEngine):
    """Engine with flash attention and the density tap."""

    def _open(self, **settings: Any) -> NativeContext:
        self._watch = _Watch()
        watched = {"flash_attn_type": 1, "cb_eval": self._watch.callback}
        context = super()._open(**watched, **settings)
        self._density = self.enter_context(context.density())
        return context

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of ``text``, which must begin a line."""
        return list(self._model.tokenize(text.encode(), False, False))

    def prefill(self, tokens: Sequence[int]) -> Prefilled:
        """Evaluate a context from its beginning."""
        self._api.llama_memory_clear(self._memory, False)
        self._density.reset()
        self._decode(tokens, 0, logits=False)
        return Prefilled(self._blob(), *self._density.read(len(tokens)))

    def go_on(self, blob: NDArray[np.uint8], tokens: Sequence[int]) -> Continuation:
        """Evaluate ``tokens`` after the cells in ``blob``.

        Short continuations are padded to a whole tile if the context has room. Padding changes no
        result, because later tokens do not affect earlier ones.
        """
        pointer = ctypes.cast(blob.ctypes.data, _Bytes)
        n_read = self._api.llama_state_seq_set_data(self._ctx, pointer, blob.nbytes, 0)
        if n_read != blob.nbytes:
            raise RuntimeError(f"the engine read {n_read} bytes of cells, expected {blob.nbytes}")
        self._watch.is_on, self._watch.seen = True, []
        start = self._api.llama_memory_seq_pos_max(self._memory, 0) + 1
        filled = [*tokens, *tokens[-1:] * (min(_TILE, self._n_ctx - start) - len(tokens))]
        self._decode(filled, start, logits=True)
        self._watch.is_on = False
        attention = np.stack(self._watch.seen).reshape(len(self._watch.seen), len(filled), -1)
        return Continuation(self._log_p(len(tokens)), attention[:, : len(tokens)])

    def _log_p(self, n_tokens: int) -> NDArray[np.float64]:
        rows = self._api.llama_get_logits(self._ctx)
        found = np.ctypeslib.as_array(rows, shape=(n_tokens, self._model.n_vocab()))
        return log_softmax(found.astype(np.float64))

    def _blob(self) -> NDArray[np.uint8]:
        size = self._api.llama_state_seq_get_size(self._ctx, 0)
        blob = np.empty(size, np.uint8)
        pointer = ctypes.cast(blob.ctypes.data, _Bytes)
        n_written = self._api.llama_state_seq_get_data(self._ctx, pointer, size, 0)
        if n_written != size:
            raise RuntimeError(f"the engine wrote {n_written} bytes of cells, expected {size}")
        return blob
