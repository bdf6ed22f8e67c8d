"""Four systems that keep many contexts on one engine: three common practices, and the plugins.

All systems have the same RAM budget, which includes the page cache. Between calls, a system's files
are dropped from the page cache until the rest fits the budget, the least recently changed first.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from llama_cpp import Llama, llama_cpp

from llmaas_hooks import RequestStats, Tokens, common_prefix, hookimpl
from llmaas_plugins.demo.page_cache import drop_pages

__all__ = ["SYSTEMS", "Ours", "Recompute", "StateFiles", "Unchanged"]


class Recompute:
    """Baseline that keeps nothing and evaluates a context's tokens again.

    The other systems override its methods. ``tokens``, shape ``(n,)``, are the tokens in a
    context's cells when it was left.
    """

    def __init__(self, llama: Llama, folder: Path, ram_budget: int) -> None:
        """Use ``folder`` for files, and at most ``ram_budget`` bytes of RAM for contexts."""
        self._llama = llama
        self._folder = folder
        self._ram_budget = ram_budget

    def enter(self, context: int, tokens: Tokens, prompt: Sequence[int]) -> None:
        """Load a context's cells into the engine before its prompt is evaluated."""
        self._llama.reset()
        n_common = common_prefix(tokens, np.asarray(prompt, dtype=np.int32))
        self._llama.eval(tokens[:n_common].tolist())

    def leave(self, context: int, tokens: Tokens) -> None:
        """Save the context in the engine, while the caller waits."""

    def background(self) -> None:
        """Do the work that the caller does not wait for."""

    def memory_bytes(self) -> int:
        """Return the RAM bytes of contexts outside the engine, without the page cache."""
        return 0

    def trim_page_cache(self) -> None:
        """Drop files from the page cache to fit the RAM budget; this is not measured."""
        room = self._ram_budget - self.memory_bytes()
        files = [path for path in self._folder.rglob("*") if path.is_file()]
        for path in sorted(files, key=lambda path: path.stat().st_mtime_ns, reverse=True):
            room -= path.stat().st_size
            if room < 0:
                drop_pages(path)


class Unchanged(Recompute):
    """App that only calls ``Llama.generate``, which evaluates what the engine does not hold."""

    def enter(self, context: int, tokens: Tokens, prompt: Sequence[int]) -> None:
        pass


class StateFiles(Recompute):
    """One file for each context, by ``llama_state_seq_save_file`` and ``_load_file``."""

    def enter(self, context: int, tokens: Tokens, prompt: Sequence[int]) -> None:
        llama, n_read = self._llama, ctypes.c_size_t()
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(llama.ctx), 0, -1, -1)
        room = (ctypes.c_int32 * llama.n_ctx())()
        done = llama_cpp.llama_state_seq_load_file(
            llama.ctx, self._path(context), 0, room, len(room), ctypes.byref(n_read)
        )
        if not done:
            raise RuntimeError(f"llama.cpp could not load {self._path(context)!r}")
        _set_resident(llama, tokens)

    def leave(self, context: int, tokens: Tokens) -> None:
        values = (ctypes.c_int32 * len(tokens))(*tokens.tolist())
        llama_cpp.llama_state_seq_save_file(
            self._llama.ctx, self._path(context), 0, values, len(tokens)
        )

    def _path(self, context: int) -> bytes:
        return str(self._folder / f"{context}.state").encode()


class DiskCache(Recompute):
    """llama-cpp-python's own ``LlamaDiskCache``, used as ``create_completion`` uses it."""

    def __init__(self, llama: Llama, folder: Path, ram_budget: int) -> None:
        from llama_cpp import LlamaDiskCache

        super().__init__(llama, folder, ram_budget)
        self._cache = LlamaDiskCache(str(folder))

    def enter(self, context: int, tokens: Tokens, prompt: Sequence[int]) -> None:
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # the cache prints each step
                item = self._cache[list(prompt)]
        except KeyError:
            return
        kept = Llama.longest_token_prefix(item.input_ids.tolist(), list(prompt))
        held = self._llama.input_ids[: self._llama.n_tokens].tolist()
        resident = Llama.longest_token_prefix(held, list(prompt))
        if kept > resident:
            self._llama.load_state(item)

    def leave(self, context: int, tokens: Tokens) -> None:
        with contextlib.redirect_stderr(io.StringIO()):
            self._cache[tokens.tolist()] = self._llama.save_state()


class Ours(Recompute):
    """The suite with ``kv_chunks``; an unchanged app only calls ``Llama.generate``."""

    def __init__(self, llama: Llama, folder: Path, ram_budget: int) -> None:
        from llmaas_plugins.activation import active_suite

        super().__init__(llama, folder, ram_budget)
        suite = active_suite()
        if suite is None:
            raise RuntimeError("activate the suite before the Llama is created")
        self._suite = suite
        self.last: RequestStats | None = None
        suite.hooks.register("demo", self)

    @hookimpl
    def llmaas_request_end(self, stats: RequestStats) -> None:
        self.last = stats

    def enter(self, context: int, tokens: Tokens, prompt: Sequence[int]) -> None:
        pass  # done inside generate; its time is ``last.prepare_s``

    def background(self) -> None:
        self._suite.settle()

    def memory_bytes(self) -> int:
        return int(self._suite.hooks.status()["kv_chunks"]["ram_bytes"])


SYSTEMS: dict[str, type[Recompute]] = {
    "recompute": Recompute,
    "state files": StateFiles,
    "LlamaDiskCache": DiskCache,
    "llmaas": Ours,
}


def _set_resident(llama: Llama, tokens: Tokens) -> None:
    """Record restored tokens; as the next prompt is longer, ``Llama`` evaluates before sampling."""
    llama.n_tokens = len(tokens)
    llama.input_ids[: len(tokens)] = tokens
