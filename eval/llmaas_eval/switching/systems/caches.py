"""llama-cpp-python's own two caches, used like ``Llama.create_completion`` uses them."""

from __future__ import annotations

import contextlib
import io
from typing import Any

from llama_cpp import llama_cpp

from llmaas_eval.switching.engine import learn_geometry
from llmaas_eval.switching.steps import Step
from llmaas_eval.switching.systems.base import Entered, Setting, room_beside_cells
from llmaas_eval.switching.systems.one import OneContext, open_llama

__all__ = ["DiskCache", "RAMCache"]

_WARM_TOKENS = 16
_COPIES = 3


class _Cache(OneContext):
    """Cache with one state of the whole engine for each context, looked up by its tokens."""

    def __init__(self, setting: Setting) -> None:
        self._room = room_beside_cells(setting)
        llama = open_llama(setting, _WARM_TOKENS, with_scratch=True)
        super().__init__(setting, llama, learn_geometry(llama.ctx))
        self._cache = self._open_cache()

    @property
    def lent_bytes(self) -> int:
        """Bytes that no setting can keep out of llama-cpp-python's caches.

        ``save_state`` makes two copies of a state besides its result, and pickle makes one. Each
        state includes a batch's logits, which the caches do not count.
        """
        context = self.setting.max_tokens * self.setting.token_bytes
        return _COPIES * context + (_COPIES + self.setting.contexts) * self._llama.scores.nbytes

    def _open_cache(self) -> Any:
        raise NotImplementedError

    def _entered(self, n_cached: int, n_missing: int) -> Entered:
        raise NotImplementedError

    def enter(self, step: Step) -> Entered:
        prompt = step.before.tolist()
        held = self._llama.input_ids[: self._llama.n_tokens].tolist()
        n_resident = self._llama.longest_token_prefix(held, prompt)
        n_cached = 0
        with contextlib.suppress(KeyError), contextlib.redirect_stderr(io.StringIO()):
            item = self._cache[prompt]  # the disk cache prints each step to stderr
            n_found = self._llama.longest_token_prefix(item.input_ids.tolist(), prompt)
            if n_found > n_resident:
                self._llama.load_state(item)
                n_cached = n_found
        n_held = max(n_resident, n_cached)
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._llama.ctx), 0, n_held, -1)
        n_missing = len(prompt) - n_held
        return (
            self._entered(n_cached, n_missing)
            if n_cached
            else Entered(n_resident=n_resident, n_missing=n_missing)
        )

    def leave(self, step: Step) -> None:
        with contextlib.redirect_stderr(io.StringIO()):
            self._cache[step.after.tolist()] = self._llama.save_state()


class RAMCache(_Cache):
    """``LlamaRAMCache`` with the part of the budget that the engine's cells leave."""

    def _open_cache(self) -> Any:
        from llama_cpp import LlamaRAMCache

        return LlamaRAMCache(self._room)

    def _entered(self, n_cached: int, n_missing: int) -> Entered:
        return Entered(n_ram=n_cached, n_missing=n_missing)


class DiskCache(_Cache):
    """``LlamaDiskCache`` with its default settings."""

    def _open_cache(self) -> Any:
        from llama_cpp import LlamaDiskCache

        return LlamaDiskCache(str(self.setting.folder))

    def _entered(self, n_cached: int, n_missing: int) -> Entered:
        return Entered(n_disk=n_cached, n_missing=n_missing)
