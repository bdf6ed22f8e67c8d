"""Systems on a ``Llama``, whose cells hold the context that was called last."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.switching.steps import Step
from llmaas_eval.switching.systems.base import Setting, System, app_cells
from llmaas_patches.internals import real_n_ctx
from llmaas_plugins._native import KVGeometry
from llmaas_plugins.kv_chunks.transfer.cells import KVCells

__all__ = ["OneContext", "open_llama"]


def open_llama(setting: Setting, n_warm: int, *, with_scratch: bool = False) -> Any:
    """Return a ``Llama`` that has evaluated ``n_warm`` tokens; they are still in its cells.

    Args:
        setting: Model file and context length.
        n_warm: Number of tokens to evaluate.
        with_scratch: Whether to add a second sequence, through which the replay injects cells.
    """
    from llama_cpp import Llama, llama_cpp

    original = llama_cpp.llama_init_from_model

    def with_two(model: Any, params: Any) -> Any:
        params.n_seq_max, params.kv_unified = 2, True
        return original(model, params)

    if with_scratch:
        llama_cpp.llama_init_from_model = with_two
    try:
        n_ctx = app_cells(setting.max_tokens)
        llama = Llama(str(setting.model), n_ctx=n_ctx, flash_attn=True, verbose=False)
    finally:
        llama_cpp.llama_init_from_model = original
    llama.eval(np.random.default_rng(0).integers(300, llama.n_vocab(), n_warm).tolist())
    return llama


class OneContext(System):
    """Base of the systems on a ``Llama``."""

    def __init__(self, setting: Setting, llama: Any, geometry: KVGeometry) -> None:
        super().__init__(setting, geometry)
        self._llama = llama
        self._tool = KVCells(llama.ctx)
        self._books(np.zeros(0, dtype=np.int32))
        self._tool.truncate(0)

    @property
    def n_cells(self) -> int:
        return real_n_ctx(self._llama.ctx)

    def cells(self, step: Step) -> NDArray[np.uint8]:
        n_tokens = len(step.after)
        blob = np.zeros(self._tool.size(0, n_tokens), dtype=np.uint8)
        self._tool.read(0, n_tokens, blob)
        return blob

    def close(self) -> None:
        self._llama.close()

    def _books(self, tokens: NDArray[np.int32]) -> None:
        """Record in ``Llama`` that its cells hold ``tokens``."""
        self._llama.n_tokens = len(tokens)
        self._llama.input_ids[: len(tokens)] = tokens

    def _cut(self, context: int, n_tokens: int) -> None:
        self._tool.truncate(n_tokens)

    def _append(self, context: int, blob: NDArray[np.uint8]) -> None:
        if not self._tool.append(blob, self._tool.end()):
            raise RuntimeError(f"llama.cpp refused {blob.nbytes} bytes of cells")

    def _grown(self, step: Step) -> None:
        self._tool.finish()
        self._books(step.after)
