"""One long context stored by ``kv_chunks``, in llama.cpp's state file and in ``LlamaRAMCache``."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.internals import (
    change_attention,
    engine_of,
    finish_writes,
    leave_ram,
    store_of,
)
from llmaas_hooks import Request, Tokens
from llmaas_plugins.demo.page_cache import drop_pages
from llmaas_plugins.kv_chunks.store.chunk_ids import CHUNK_TOKENS

__all__ = ["StoredContext"]

_CONTEXT = "bench"
_Bytes = ctypes.POINTER(ctypes.c_uint8)


class StoredContext(contextlib.ExitStack):
    """The suite with one engine, and a vanilla engine beside it; all are closed at the end.

    Attributes:
        state_file: File that ``llama_state_seq_save_file`` writes.
        slab: File with the chunks of ``kv_chunks``.
    """

    def __init__(
        self, model: Path, blob: NDArray[np.uint8], tokens: Tokens, codec: str, folder: Path
    ) -> None:
        """Set the context that both engines will hold; ``__enter__`` creates them.

        Args:
            model: GGUF file.
            blob: Sequence state of ``tokens`` from ``llama_state_seq_get_data``.
            tokens: Token ids, shape ``(n,)``.
            codec: Codec of ``kv_chunks``.
            folder: Folder for the state file and the chunks.
        """
        super().__init__()
        self._blob, self._tokens, self._codec, self._folder = blob, tokens, codec, folder
        self._model = model
        self.state_file = folder / "vanilla.state"
        self.slab = folder / "kv" / "chunks.slab"

    def __enter__(self) -> Self:
        """Create both engines and save the context with each."""
        super().__enter__()
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        return self

    def _open(self) -> None:
        from llama_cpp import LlamaRAMCache, llama_cpp

        self._vanilla = self._open_llama()
        self._cache = LlamaRAMCache()
        self._load_file = llama_cpp.llama_state_seq_load_file
        self._save_file = llama_cpp.llama_state_seq_save_file
        self._seq_rm = llama_cpp.llama_memory_seq_rm
        self._memory = llama_cpp.llama_get_memory(self._vanilla.ctx)
        self._values = (ctypes.c_int32 * len(self._tokens))(*self._tokens.tolist())
        self._fill(self._vanilla)
        self.vanilla_save()
        self._activate()
        self._llama = self._open_llama()
        self._fill(self._llama)
        self._engine = engine_of(self._suite, self._llama)
        self._request = Request(self._engine, self._tokens, _CONTEXT)
        self._pretend_attention()
        self.save()
        self.settle()

    # -- ours -----------------------------------------------------------------------------------

    def save(self) -> None:
        """Save the context: the part that a caller waits for. ``settle`` waits for the rest."""
        self._suite.hooks.kv_save(self._request, self._tokens)

    def settle(self) -> None:
        """Wait until the context is encoded and on disk."""
        finish_writes(self._suite)

    def forget(self) -> None:
        """Remove the context from every tier, so that the next ``save`` stores all of it."""
        self._fill(self._llama)
        self._suite.evict(_CONTEXT)

    def restore(self) -> None:
        """Load the context from the tier that holds it."""
        with self._engine.lent():
            restored = self._suite.hooks.kv_restore(self._request)
        assert restored is not None
        assert restored.n_tokens == len(self._tokens)

    def leave_ram(self) -> None:
        """Evict all chunks from the RAM tier; all of them are on disk."""
        leave_ram(self._suite)

    # -- vanilla --------------------------------------------------------------------------------

    def vanilla_save(self) -> None:
        """Save the vanilla context with ``llama_state_seq_save_file``."""
        done = self._save_file(
            self._vanilla.ctx, str(self.state_file).encode(), 0, self._values, len(self._values)
        )
        assert done

    def vanilla_restore(self) -> None:
        """Load the vanilla context with ``llama_state_seq_load_file``."""
        n_read = ctypes.c_size_t()
        done = self._load_file(
            self._vanilla.ctx,
            str(self.state_file).encode(),
            0,
            self._values,
            len(self._values),
            ctypes.byref(n_read),
        )
        assert done

    def cache_save(self) -> None:
        """Save the context as ``Llama`` with a ``LlamaRAMCache`` does at the end of a call."""
        self._cache[self._tokens.tolist()] = self._vanilla.save_state()

    def cache_restore(self) -> None:
        """Load the context as ``Llama`` with a ``LlamaRAMCache`` does before the next call."""
        self._vanilla.load_state(self._cache[self._tokens.tolist()])

    # -- both -----------------------------------------------------------------------------------

    def drop_pages(self) -> None:
        """Drop both files from the page cache."""
        drop_pages(self.state_file)
        drop_pages(self.slab)

    def empty(self) -> None:
        """Remove all cells from both engines."""
        from llama_cpp import llama_cpp

        self._seq_rm(self._memory, 0, -1, -1)
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._llama.ctx), 0, -1, -1)
        self._llama.n_tokens = 0

    @property
    def n_bytes(self) -> int:
        """Bytes of the context's sequence state."""
        return self._blob.nbytes

    @property
    def stored_bytes(self) -> int:
        """Bytes of the chunks in ``kv_chunks``."""
        return sum(chunk.size for chunk in store_of(self._suite).tree)

    # -- inside ---------------------------------------------------------------------------------

    def _activate(self) -> None:
        from llmaas_plugins import activate

        table = {"codec": self._codec, "ram_budget": 256 << 20, "store": self._folder / "kv"}
        config = {"on_error": "raise", "plugins": {"kv_chunks": table}}
        self._suite = self.enter_context(activate(config))

    def _pretend_attention(self) -> None:
        """Draw lognormal attention densities, because loaded cells have received no attention."""
        n_chunks = -(-len(self._tokens) // CHUNK_TOKENS)
        densities = np.exp(np.random.default_rng(0).standard_normal(n_chunks))
        change_attention(self._suite, self._engine, lambda *_: (densities, np.ones(n_chunks)))

    def _open_llama(self) -> Any:
        from llama_cpp import Llama

        n_ctx = len(self._tokens) + 256
        llama = Llama(str(self._model), n_ctx=n_ctx, flash_attn=True, verbose=False)
        self.callback(llama.close)
        return llama

    def _fill(self, llama: Any) -> None:
        from llama_cpp import llama_cpp

        pointer = ctypes.cast(self._blob.ctypes.data, _Bytes)
        n_read = llama_cpp.llama_state_seq_set_data(llama.ctx, pointer, self._blob.nbytes, 0)
        assert n_read == self._blob.nbytes
        llama.n_tokens = len(self._tokens)
        llama.input_ids[: len(self._tokens)] = self._tokens
