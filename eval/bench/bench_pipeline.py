"""Eq 4 of LLMS on this machine: restore a context from disk by reading, computing, or both.

The figure is the delay until the engine has all cells of a context whose chunks are only on disk. A
*cut* is the number of first chunks that are computed while the others are read. At cut 0, all
chunks are read; at the largest cut, all are computed.

The plugin chooses a cut from measurements of earlier loads. The benchmark searches for the best
cut: first some over the whole range, then each cut near the best of these. Then the plugin's plan
and the best cut take turns.

The block layer limits the disk's speed (cgroup v1 blkio, which lets a tenth of a second's bytes
pass at once).
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from llmaas_eval.disk import can_limit_reads, read_limit
from llmaas_eval.internals import engine_of, leave_ram
from llmaas_eval.paired import compare, repeats
from llmaas_plugins.kv_chunks.store.chunk_ids import CHUNK_TOKENS
from llmaas_plugins.kv_chunks.transfer.planning import LoadPlan, as_runs

N_TOKENS = {"reference_model": 1000, "model_200m": 768}
N_LEARNING, N_ROUNDS = 8, 10
N_CUTS, N_NEAR, N_TRIES = 12, 5, 2


class StoredPrompt(contextlib.ExitStack):
    """An engine with the plugin, and a store on disk that holds a context's chunks."""

    def __init__(self, model, n_tokens, folder):
        super().__init__()
        self._model, self.folder = model, folder
        rng = np.random.default_rng(0)
        self.tokens = rng.integers(300, 1000, n_tokens).astype(np.int32)

    def __enter__(self):
        super().__enter__()
        from llama_cpp import Llama

        from llmaas_plugins import activate

        table = {"store": str(self.folder / "kv")}
        suite = self.enter_context(activate({"on_error": "raise", "plugins": {"kv_chunks": table}}))
        self.llama = self.enter_context(
            contextlib.closing(
                Llama(str(self._model), n_ctx=len(self.tokens) + 64, flash_attn=True, verbose=False)
            )
        )
        next(self.llama.generate(self.tokens.tolist(), temp=0.0))
        suite.settle()
        plugin = suite.plugin("kv_chunks")
        plugin._store.flush()
        self.suite, self.store = suite, plugin._store
        self.engine = engine_of(suite, self.llama)
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
        """Remove the context from the engine and from the RAM tier."""
        self.engine.drop_resident()
        leave_ram(self.suite)

    def bring(self):
        """Give the engine all cells; return the result of the load, or None without a load."""
        with self.engine.lent():
            loaded = self.transfer.restore(self.tokens, self.tokens[:0], None, None)
        if loaded is not None:
            self.engine.set_restored(self.tokens[: loaded.n_tokens])
        n_there = 0 if loaded is None else loaded.n_tokens
        if n_there < len(self.tokens):
            self.llama.eval(self.tokens[n_there:].tolist())
        return loaded

    def bring_cut(self, cut):
        """Give the engine all cells, with the first ``cut`` chunks computed."""
        with self.cut_at(cut):
            self.bring()

    def cut_seconds(self, cut):
        """Return the least seconds of ``bring_cut`` in a few tries."""
        seconds = []
        for _ in range(N_TRIES):
            self.empty()
            started = time.perf_counter()
            self.bring_cut(cut)
            seconds.append(time.perf_counter() - started)
        return min(seconds)

    @contextlib.contextmanager
    def cut_at(self, cut):
        """Replace the plugin's plan by this cut."""
        self.transfer._loader._plan = lambda chunks, _start: LoadPlan(as_runs(chunks, cut), None)
        try:
            yield self
        finally:
            del self.transfer._loader._plan


@pytest.fixture(params=N_TOKENS)
def prompt(request, bench_dir):
    model = request.getfixturevalue(request.param)
    with (
        tempfile.TemporaryDirectory(dir=bench_dir) as folder,
        StoredPrompt(model, N_TOKENS[request.param], Path(folder)) as prompt,
    ):
        yield prompt


@pytest.mark.skipif(not can_limit_reads(), reason="needs a writable cgroup v1 blkio controller")
@pytest.mark.parametrize("mb_per_s", [2, 5, 20, 100])
def bench_plan(prompt, benchmark, mb_per_s):
    """Compare the plan with the best cut, and its predicted with its actual time."""
    loads = []

    def bring():
        loads.append(prompt.bring())

    with read_limit(prompt.folder, mb_per_s * 1_000_000):
        for _ in range(repeats(N_LEARNING)):
            prompt.empty()
            prompt.bring()
        found = search(prompt)
        best = min(found, key=found.get)
        compare(
            benchmark, bring, lambda: prompt.bring_cut(best), before=prompt.empty, rounds=N_ROUNDS
        )
    figures, cuts = benchmark.extra_info, sorted(found)
    figures["best_ms"] = figures.pop("vanilla_ms")
    figures.update(
        stored_mb=prompt.n_bytes() / 1e6,
        read_alone_ms=1e3 * found[cuts[0]],
        compute_alone_ms=1e3 * found[cuts[-1]],
        best_computes=CHUNK_TOKENS * best,
        **planned(loads[-1], len(prompt.tokens)),
    )


def search(prompt):
    """Return seconds by cut, for some cuts over the whole range and all near the best of these."""
    found, n = {}, prompt.n_chunks
    for cut in {*range(0, n, -(-n // repeats(N_CUTS))), n}:
        found[cut] = prompt.cut_seconds(cut)
    best, n_near = min(found, key=found.get), repeats(N_NEAR)
    for cut in set(range(max(0, best - n_near), min(n, best + n_near) + 1)) - set(found):
        found[cut] = prompt.cut_seconds(cut)
    return found


def planned(loaded, n_tokens):
    """Return the plugin's last choice and its predicted and actual time."""
    if loaded is None:
        return {"plan_computes": n_tokens}
    figures = {"plan_computes": loaded.n_recomputed + n_tokens - loaded.n_tokens}
    if loaded.predicted_s is not None:
        figures |= {"predicted_ms": 1e3 * loaded.predicted_s, "actual_ms": 1e3 * loaded.actual_s}
    return figures
