"""Eq 4 of LLMS on this machine: a context on disk, brought back by reading, computing, or both.

Delay until the engine has all cells of a context whose chunks are only on disk. *Reading* loads
all of it, *computing* evaluates all of it; the *plan* is what the plugin chooses from what it
measured in the loads before. The *best* is found by trying cuts one by one. Disks are as fast as
the block layer lets them be (cgroup v1 blkio), or as this one is.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from llmaas_eval.disk import can_limit_reads, read_limit
from llmaas_plugins.kv_chunks.planning import Plan, as_runs
from llmaas_plugins.models import reference_model_path

N_TOKENS = {"7M": 1000, "200M": 1000}
N_LEARNING, N_ROUNDS, N_CUTS, N_TRIES = 8, 5, 8, 2
TO_MS = 1e3


class StoredPrompt(contextlib.ExitStack):
    """An engine under the plugin, and a store on disk that has a context's chunks."""

    def __init__(self, model, n_tokens, folder):
        super().__init__()
        self._model, self._folder = model, folder
        rng = np.random.default_rng(0)
        self.tokens = rng.integers(300, 1000, n_tokens).astype(np.int32)

    def __enter__(self):
        super().__enter__()
        from llama_cpp import Llama

        from llmaas_plugins import activate

        table = {"codec": "int8", "store": str(self._folder / "kv")}
        suite = self.enter_context(activate({"on_error": "raise", "plugins": {"kv_chunks": table}}))
        self.llama = self.enter_context(
            contextlib.closing(
                Llama(str(self._model), n_ctx=len(self.tokens) + 64, flash_attn=True, verbose=False)
            )
        )
        next(self.llama.generate(self.tokens.tolist(), temp=0.0))
        suite.settle()
        plugin = suite.hooks._pm.get_plugin("kv_chunks")
        plugin._store.flush()
        self.store = plugin._store
        self.engine = suite._installed._host.engine(self.llama)
        self.transfer = plugin._transfers[self.engine]
        return self

    @property
    def n_chunks(self):
        return len(self._path())

    def n_bytes(self):
        return sum(chunk.size for chunk in self._path())

    def _path(self):
        return self.store.match(self.transfer._root(None), self.tokens).path

    def empty(self):
        """Nothing is in the engine, nothing in RAM."""
        self.engine.drop_resident()
        shelf = self.store._shelf
        with shelf.lock:
            for chunk in self.store.tree:
                if chunk.ram >= 0:
                    shelf.reclaim(chunk)

    def bring(self):
        """Seconds until the engine has all cells, and what the load says of itself, if any."""
        self.empty()
        nothing = self.tokens[:0]
        started = time.perf_counter()
        with self.engine.lent():
            loaded = self.transfer.restore(self.tokens, nothing, None)
        if loaded is not None:
            self.engine.set_restored(self.tokens[: loaded.n_tokens])
        n_there = 0 if loaded is None else loaded.n_tokens
        if n_there < len(self.tokens):
            self.llama.eval(self.tokens[n_there:].tolist())
        return time.perf_counter() - started, loaded

    def compute(self):
        """Seconds that evaluating everything takes."""
        self.empty()
        started = time.perf_counter()
        self.llama.eval(self.tokens.tolist())
        return time.perf_counter() - started

    @contextlib.contextmanager
    def cut_at(self, cut):
        """Let this be the plan."""
        self.transfer._plan = lambda chunks, _start: Plan(as_runs(chunks, cut), None)
        try:
            yield self
        finally:
            del self.transfer._plan


@pytest.fixture(params=N_TOKENS)
def prompt(request, bench_dir):
    model = (
        reference_model_path() if request.param == "7M" else request.getfixturevalue("model_200m")
    )
    with (
        tempfile.TemporaryDirectory(dir=bench_dir) as folder,
        StoredPrompt(model, N_TOKENS[request.param], Path(folder)) as prompt,
    ):
        yield prompt


@pytest.mark.parametrize("mb_per_s", [2, 5, 20, 100, None], ids=lambda mb: f"{mb or 'full'}")
def bench_plan(prompt, benchmark, mb_per_s):
    """Reading, computing, the plan and the best cut."""
    if mb_per_s is not None and not can_limit_reads():
        pytest.skip("needs a writable cgroup v1 blkio controller")
    limit = contextlib.nullcontext()
    if mb_per_s is not None:
        limit = read_limit(prompt._folder, mb_per_s * 1_000_000)
    with limit:
        loads = [prompt.bring()[1] for _ in range(N_LEARNING)]
        benchmark.pedantic(lambda: loads.append(prompt.bring()), rounds=N_ROUNDS)
        plans = loads[N_LEARNING:]
        found = cuts(prompt)
        computing = statistics.median(prompt.compute() for _ in range(N_TRIES))
    ours = statistics.median(seconds for seconds, _ in plans)
    n_recomputed = len(prompt.tokens)
    if plans[-1][1] is not None:
        n_recomputed = plans[-1][1].n_recomputed
    best_cut = min(found, key=found.get)
    best = min(found[best_cut], computing)
    predicted = [loaded.predicted_s for _, loaded in plans if loaded and loaded.predicted_s]
    benchmark.extra_info.update(
        {
            "stored_mb": prompt.n_bytes() / 1e6,
            "read_ms": TO_MS * found[0],
            "compute_ms": TO_MS * computing,
            "plan_ms": TO_MS * ours,
            "predicted_ms": TO_MS * statistics.median(predicted) if predicted else float("nan"),
            "plan_recomputes": n_recomputed,
            "best_ms": TO_MS * best,
            "best_recomputes": 16 * best_cut,
            "over_best": ours / best,
        }
    )


def cuts(prompt):
    """Seconds of some cuts, the least of a few tries each."""
    step = -(-prompt.n_chunks // N_CUTS)
    found = {}
    for cut in range(0, prompt.n_chunks, step):
        with prompt.cut_at(cut):
            found[cut] = min(prompt.bring()[0] for _ in range(N_TRIES))
    return found
