"""Time that an interruption of an answer costs, beside the work of the request that interrupts."""

from __future__ import annotations

import contextlib
import threading
import time

import numpy as np
import pytest
from llama_cpp import Llama

from llmaas_eval.paired import repeats
from llmaas_eval.stats import quartiles
from llmaas_hooks import hookimpl, serving_context
from llmaas_plugins import activate

N_CONTEXT = 2000
N_INTERRUPTIONS = 200
N_CELLS = 2560
"""Cells of the engine: with ``lossless``, 256 at least for the request that interrupts."""
KINDS = {
    "tolerance": {"codec": "tolerance"},
    "lossless": {"codec": "lossless"},
    "parked": {"codec": "lossless", "parked_tokens": 4096},
}
TIGHT = [1, *range(400, 415)]


class Interrupter:
    """Plugin that lets a short request of another app go before each token of a long answer.

    Attributes:
        seconds: Times from the end of one token to the beginning of the next one, without the
            batches of the request in between.
    """

    def __init__(self):
        self.llama = None
        self.seconds: list[float] = []
        self._began = self._computed = None
        self._is_other = False

    @hookimpl
    def llmaas_turn(self, n_left):
        if self._is_other or n_left or self.llama is None:
            return
        self._is_other, self._began, self._computed = True, time.perf_counter(), 0.0
        thread = threading.Thread(target=self._ask)
        thread.start()
        thread.join()
        self._is_other = False

    @hookimpl
    def llmaas_decode(self, step):
        if self._began is None:
            return
        if self._is_other:
            self._computed += step.seconds
        else:
            passed = time.perf_counter() - self._began - step.seconds
            self.seconds.append(passed - self._computed)
            self._began = None

    def _ask(self):
        with serving_context(None, "keyboard"):
            next(self.llama.generate(TIGHT, temp=0.0))


@pytest.mark.parametrize("kind", KINDS)
def bench_leave_and_enter(model_1b, benchmark, kind, tmp_path):
    """Interrupt a 2,000-token context at each token of its answer."""
    plugin = Interrupter()
    table = {"store": str(tmp_path), "ram_budget": "1 GiB"} | KINDS[kind]
    config = {"on_error": "raise", "plugins": {"kv_chunks": table}}
    n_tokens = repeats(N_INTERRUPTIONS)
    with (
        activate(config, {"interrupter": plugin}),
        contextlib.closing(Llama(str(model_1b), n_ctx=N_CELLS, verbose=False)) as llama,
        serving_context(None, "mail"),
    ):
        prompt = np.random.default_rng(0).integers(300, 1000, N_CONTEXT)
        stream = llama.generate(prompt.tolist(), temp=0.0)
        next(stream)
        plugin.llama = llama
        next(stream)  # the first interruption saves the whole context
        benchmark.extra_info["first_ms"] = 1000 * plugin.seconds.pop()
        benchmark.pedantic(next, (stream,), rounds=n_tokens)
        stream.close()
    milliseconds = 1000 * np.array(plugin.seconds)
    benchmark.extra_info["leave_and_enter_ms"] = quartiles(milliseconds)
    benchmark.extra_info["p99_ms"] = float(np.percentile(milliseconds, 99))
