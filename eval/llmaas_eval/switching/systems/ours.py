"""This suite with ``kv_chunks``, through the hooks that ``Llama.generate`` calls."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
from llmaas_plugins.kv_chunks.keys import CHUNK_TOKENS
from llmaas_plugins.kv_chunks.recompute import evaluate
from llmaas_plugins.machine import resident_bytes

__all__ = ["Ours"]

_BATCH_TOKENS = 512
_N_DENSITIES, _STRIDE = 4096, 61


class Ours(OneContext):
    """The options are the plugin's own settings; budget and place are the replay's."""

    def __init__(self, setting: Setting) -> None:
        from llmaas_plugins import activate

        table = {
            "disk_budget": 64 << 30,
            **setting.options,
            "store": setting.folder / "kv",
            "ram_budget": room_beside_cells(setting),
        }
        self._behind: threading.Thread | None = None
        self._suite: Any = activate({"on_error": "raise", "plugins": {"kv_chunks": table}})
        try:  # it recomputes for real, so all that a batch needs must be there before
            n_warm = min(_BATCH_TOKENS, setting.max_tokens)
            llama = open_llama(setting, n_warm)
            super().__init__(setting, llama, learn_geometry(llama.ctx))
            self._engine = self._suite._installed._host.engine(llama)
            self._pretend_attention()
            self._cell_bytes = self._touch_cells()
        except BaseException:
            self._suite.deactivate()
            raise

    @property
    def _plugin(self) -> Any:
        return self._suite.plugin("kv_chunks")

    @property
    def cell_bytes(self) -> int:
        return self._cell_bytes

    def _touch_cells(self) -> int:
        """Fill the app's cells once; bytes of all cells that have memory now.

        llama.cpp takes memory for all at once. The plugin may have given it back, and then they
        take it as they are written.
        """
        n_cells, before = app_cells(self.setting.max_tokens), resident_bytes()
        for start in range(0, n_cells, PIECE_TOKENS):
            self._append(0, self._cells.blob(0, 0, start, PIECE_TOKENS))
        self._cut(0, 0)
        n_bytes = n_cells * self.setting.token_bytes
        is_late = resident_bytes() - before > n_bytes // 2
        return n_bytes if is_late else super().cell_bytes

    def _pretend_attention(self) -> None:
        """Add attention to what the engine's tap counts: injected cells get none by themselves.

        The density of a context's chunk is drawn once, log-normal.
        """
        attention: Any = self._plugin._transfer(self._engine)._attention
        if attention is None:
            return
        densities = np.exp(np.random.default_rng(0).standard_normal(_N_DENSITIES))
        take = attention.take

        def pretended(n_tokens: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
            sums, counts = take(n_tokens)
            chunks = np.arange(len(sums)) + _STRIDE * self._step.context
            seen = float(CHUNK_TOKENS * (self._step.n_prompt + self._step.n_reply))
            return sums + seen * densities[chunks % _N_DENSITIES], counts + seen

        attention.take = pretended

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
        """Idle time passes for real, as far as there is work to be done in it."""
        self._behind = threading.Thread(target=self._finish, args=[self._behind])
        self._behind.start()
        self._behind.join(idle_s)

    def _finish(self, before: threading.Thread | None) -> None:
        self._suite.settle()
        self._plugin._workers.write.submit(int).result()  # behind what the call left there
        if before is not None:
            before.join()

    def status(self) -> Mapping[str, Any]:
        """The plugin's own report.

        Raises:
            RuntimeError: It failed behind a call, so the replay was not of what it can do.
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
        self._engine.set_restored(step.after)  # as if ``Llama`` had evaluated it

    def _evaluate_last(self, step: Step) -> None:
        """Evaluate the last token and put the injected cell back.

        From the graphs that it computes the engine learns how far its cells are in use; in a real
        call there is always one.
        """
        last = len(step.after) - 1
        with self._engine.lent():
            self._tool.finish()
            super()._cut(step.context, last)
            evaluate(self._llama.ctx, step.after[last:], last)
            super()._cut(step.context, last)
            super()._append(step.context, self._cells.blob(step.context, step.window, last, 1))

    def _request(self, step: Step, tokens: Tokens) -> Request:
        return Request(self._engine, tokens, f"context-{step.context}")
