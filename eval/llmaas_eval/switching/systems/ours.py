"""This suite with ``kv_chunks``, through the hooks that ``Llama.generate`` calls."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.internals import Taken, change_attention, engine_of, finish_writes
from llmaas_eval.switching.engine import learn_geometry
from llmaas_eval.switching.steps import Step
from llmaas_eval.switching.synthetic import PIECE_TOKENS
from llmaas_eval.switching.systems.base import (
    Entered,
    Setting,
    app_cells,
    room_beside_cells,
)
from llmaas_eval.switching.systems.one import OneContext, open_llama
from llmaas_hooks import Request, Tokens, common_prefix
from llmaas_plugins.failure_log import FailureLog
from llmaas_plugins.kv_chunks.store.chunk_ids import CHUNK_TOKENS
from llmaas_plugins.kv_chunks.transfer.recompute import evaluate
from llmaas_plugins.machine import resident_bytes

__all__ = ["Ours"]

_BATCH_TOKENS = 512
_N_DENSITIES, _STRIDE = 4096, 61


class Ours(OneContext):
    """This suite. The options are settings of the plugin; the replay sets budget and folder."""

    def __init__(self, setting: Setting) -> None:
        from llmaas_plugins import activate

        table = {
            "disk_budget": 64 << 30,
            **setting.options,
            "store": setting.folder / "kv",
            "ram_budget": room_beside_cells(setting),
        }
        self._behind: threading.Thread | None = None
        self._failures = FailureLog(logging.getLogger("llmaas.eval"))
        self._suite: Any = activate({"on_error": "raise", "plugins": {"kv_chunks": table}})
        try:  # recomputing is real here, so a batch's memory must be allocated before
            n_warm = min(_BATCH_TOKENS, setting.max_tokens)
            llama = open_llama(setting, n_warm)
            super().__init__(setting, llama, learn_geometry(llama.ctx))
            self._engine = engine_of(self._suite, llama)
            self._pretend_attention()
            self._cell_bytes = self._touch_cells()
        except BaseException:
            self._suite.deactivate()
            raise

    @property
    def cell_bytes(self) -> int:
        return self._cell_bytes

    def _touch_cells(self) -> int:
        """Fill the app's cells once; return the bytes of all cells that have memory now.

        llama.cpp reserves memory for all cells at once. The plugin may have given that memory back;
        then cells take memory again as they are written.
        """
        n_cells, before = app_cells(self.setting.max_tokens), resident_bytes()
        for start in range(0, n_cells, PIECE_TOKENS):
            self._append(0, self._cells.blob(0, 0, start, PIECE_TOKENS))
        self._cut(0, 0)
        n_bytes = n_cells * self.setting.token_bytes
        is_late = resident_bytes() - before > n_bytes // 2
        return n_bytes if is_late else super().cell_bytes

    def _pretend_attention(self) -> None:
        """Add synthetic attention to the engine's tap, which sees none for injected cells.

        Each chunk of a context gets a density that is drawn once, log-normal.
        """
        densities = np.exp(np.random.default_rng(0).standard_normal(_N_DENSITIES))

        def pretended(take: Callable[[int], Taken], n_tokens: int) -> Taken:
            sums, counts = take(n_tokens)
            chunks = np.arange(len(sums)) + _STRIDE * self._step.context
            seen = float(CHUNK_TOKENS * (self._step.n_prompt + self._step.n_reply))
            return sums + seen * densities[chunks % _N_DENSITIES], counts + seen

        change_attention(self._suite, self._engine, pretended)

    def enter(self, step: Step) -> Entered:
        self._engine.settle()
        resident = self._engine.resident_tokens()
        with self._engine.lent():
            restored = self._suite.hooks.kv_restore(self._request(step, step.before))
        n_kept = common_prefix(resident, step.before)
        n_held = n_kept if restored is None else restored.n_tokens
        n_loaded = 0 if restored is None else restored.n_loaded
        n_computed = 0 if restored is None else restored.n_recomputed
        self._cut(step.context, n_held)
        return Entered(
            n_resident=n_held - n_loaded - n_computed,
            n_disk=n_loaded,
            n_computed=n_computed,
            n_missing=len(step.before) - n_held,
        )

    def cells(self, step: Step) -> NDArray[np.uint8]:
        with self._engine.lent():
            return super().cells(step)

    def leave(self, step: Step) -> None:
        self._suite.hooks.kv_save(self._request(step, step.prompt), step.after)

    def background(self, step: Step, idle_s: float) -> None:
        """Let idle time pass for real while the plugin has work to do."""
        self._behind = threading.Thread(target=self._finish, args=[self._behind])
        self._behind.start()
        self._behind.join(idle_s)

    def _finish(self, before: threading.Thread | None) -> None:
        finish_writes(self._suite)
        if before is not None:
            before.join()

    def status(self) -> Mapping[str, Any]:
        """Return the plugin's own report.

        Raises:
            RuntimeError: The plugin failed during a call, so the replay does not show its
                performance.
        """
        found = self._suite.status()
        if found["errors"]:
            raise RuntimeError(f"the plugin failed: {found['errors']}")
        return dict(found["plugins"]["kv_chunks"])

    def close(self) -> None:
        if self._behind is not None:
            self._behind.join()
        super().close()
        self._suite.deactivate()

    def _cut(self, context: int, n_tokens: int) -> None:
        with self._engine.lent():
            super()._cut(context, n_tokens)

    def _append(self, context: int, blob: NDArray[np.uint8]) -> None:
        with self._engine.lent():
            super()._append(context, blob)

    def _grown(self, step: Step) -> None:
        self._step = step
        self._evaluate_last(step)
        with self._engine.lent():
            super()._grown(step)
        # as if ``Llama`` had evaluated these tokens
        self._engine.set_restored(step.after, self._engine.resident_app)

    def _evaluate_last(self, step: Step) -> None:
        """Evaluate the last token, then put the injected cell back.

        The engine learns from its graphs how many of its cells are in use. A real call always
        evaluates a graph, but an injected one does not.
        """
        last = len(step.after) - 1
        with self._engine.lent():
            self._tool.finish()
            super()._cut(step.context, last)
            evaluate(self._llama.ctx, step.after[last:], last, self._failures)
            super()._cut(step.context, last)
            super()._append(step.context, self._cells.blob(step.context, step.window, last, 1))

    def _request(self, step: Step, tokens: Tokens) -> Request:
        return Request(self._engine, tokens, f"context-{step.context}")
