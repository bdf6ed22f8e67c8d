"""Cost of parked cells: the time of a token beside them, and the time of a switch."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from llmaas_eval.paired import repeats
from llmaas_eval.stats import median_interval, quartiles
from llmaas_hooks import ParkedSequences, hookimpl
from llmaas_plugins import activate
from llmaas_plugins.kv_chunks.parking.parked_contexts import ParkedContexts
from llmaas_plugins.kv_chunks.parking.sequences import PARKED_SEQUENCES

N_BLOCK = 1024
"""Tokens of the context in use, and of each parked piece."""
PARKED = (1024, 2048)
N_ROUNDS, N_TOKENS, N_SWITCHES = 12, 6, 200
N_SEQUENCES = PARKED_SEQUENCES.start + PARKED[-1] // N_BLOCK + 1


@dataclass(eq=False)
class Engine:
    """Context with spare cells, driven by llama.cpp's bindings.

    The class has the attributes of an engine that ``ParkedContexts`` uses.
    """

    model: int
    ctx: int
    n_spare: int
    native: Any
    parked: ParkedSequences = field(default_factory=ParkedSequences)

    def __post_init__(self):
        self.memory = llama_cpp.llama_get_memory(self.ctx)
        self.batch = llama_cpp.llama_batch_init(N_BLOCK, 0, 1)

    def decode(self, n, start):
        batch, batch.n_tokens = self.batch, n
        for i in range(n):
            batch.token[i], batch.pos[i] = 300 + i, start + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = i == n - 1
        started = time.perf_counter()
        assert llama_cpp.llama_decode(self.ctx, batch) == 0
        return time.perf_counter() - started

    def save(self, start=0):
        """Remove the cells before position ``start`` and return the state of the others."""
        llama_cpp.llama_memory_seq_rm(self.memory, 0, 0, start)
        blob = np.empty(llama_cpp.llama_state_seq_get_size(self.ctx, 0), dtype=np.uint8)
        llama_cpp.llama_state_seq_get_data(self.ctx, pointer(blob), blob.nbytes, 0)
        return blob

    def load(self, blob, sequence):
        n = llama_cpp.llama_state_seq_set_data(self.ctx, pointer(blob), blob.nbytes, sequence)
        assert n == blob.nbytes

    def lay_out(self, blobs, n_parked, *, is_split):
        """Place own cells after parked ones; if split, place half of them before."""
        whole, second_half = blobs
        llama_cpp.llama_memory_clear(self.memory, False)
        if is_split:
            self.load(whole, 0)
        for i in range(n_parked // N_BLOCK):
            self.load(whole, PARKED_SEQUENCES.start + i)
        if is_split:
            llama_cpp.llama_memory_seq_rm(self.memory, 0, N_BLOCK // 2, -1)
            self.load(whole, N_SEQUENCES - 1)  # occupies the freed cells
            self.load(second_half, 1)
            llama_cpp.llama_memory_seq_cp(self.memory, 1, 0, 0, -1)
            llama_cpp.llama_memory_seq_rm(self.memory, 1, 0, -1)
        else:
            self.load(whole, 0)

    def token_ms(self, blobs, n_parked, *, is_narrow=False, is_split=False):
        """Return the least milliseconds of a token after ``N_BLOCK`` others."""
        self.native.narrow_attention = is_narrow
        self.lay_out(blobs, n_parked, is_split=is_split)
        seconds = [self.decode(1, N_BLOCK + i) for i in range(N_TOKENS)]
        return 1e3 * min(seconds[1:])


class Listener:
    """Plugin that keeps the newest native context."""

    context = None

    @hookimpl
    def llmaas_native_context(self, context):
        self.context = context


def pointer(blob):
    return ctypes.cast(blob.ctypes.data, ctypes.POINTER(ctypes.c_uint8))


@contextlib.contextmanager
def opened(path, n_spare, *, flash, n_threads):
    listener = Listener()
    with activate({"plugins": {}}, {"listener": listener}):
        model = llama_cpp.llama_model_load_from_file(
            os.fsencode(path), llama_cpp.llama_model_default_params()
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch = 3 * N_BLOCK + n_spare, N_BLOCK
        params.n_seq_max, params.kv_unified = N_SEQUENCES, True
        params.n_threads = params.n_threads_batch = n_threads
        params.flash_attn_type = int(flash)
        ctx = llama_cpp.llama_init_from_model(model, params)
        engine = Engine(model, ctx, n_spare, listener.context)
        yield engine
        llama_cpp.llama_batch_free(engine.batch)
        llama_cpp.llama_free(ctx)
        llama_cpp.llama_model_free(model)


WAYS = {
    "stock": {},
    "narrow": {"is_narrow": True},
    "stock_split": {"is_split": True},
    "narrow_split": {"is_narrow": True, "is_split": True},
}
"""Options by name: whether attention is narrowed, and whether parked cells split the own ones."""


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("flash", [False, True], ids=["no flash attention", "flash attention"])
@pytest.mark.parametrize("model", ["reference_model", "model_200m", "model_1b"])
def bench_token_beside_parked_cells(request, benchmark, model, flash, n_threads):
    """Measure all options and numbers of parked cells, each against none in the same round."""
    path = request.getfixturevalue(model)
    with opened(path, PARKED[-1], flash=flash, n_threads=n_threads) as engine:
        engine.decode(N_BLOCK, 0)
        blobs = engine.save(), engine.save(N_BLOCK // 2)
        rounds = [
            [engine.token_ms(blobs, 0)]
            + [engine.token_ms(blobs, n, **way) for way in WAYS.values() for n in PARKED]
            for _ in range(repeats(N_ROUNDS))
        ]
        benchmark.pedantic(engine.token_ms, (blobs, 0), rounds=1)
    times = np.array(rounds)
    cell_bytes = blobs[0].nbytes / N_BLOCK
    benchmark.extra_info["model_mb"] = Path(path).stat().st_size / 1e6
    benchmark.extra_info["cell_kib"] = cell_bytes / 1024
    benchmark.extra_info["token_ms"] = quartiles(times[:, 0])
    for i, (name, n) in enumerate(itertools.product(WAYS, PARKED), 1):
        median, low, high = median_interval(100 * (times[:, i] / times[:, 0] - 1))
        benchmark.extra_info[f"{name}_{n}"] = f"{median:.1f} ({low:.1f} to {high:.1f})"


@pytest.mark.parametrize("n_tokens", [256, N_BLOCK])
def bench_switch(model_200m, benchmark, n_tokens):
    """Measure switches between two contexts of equal length."""
    rng = np.random.default_rng(0)
    contexts = [rng.integers(300, 4000, n_tokens).astype(np.int32) for _ in range(2)]
    with opened(model_200m, 2048, flash=True, n_threads=os.cpu_count()) as engine:
        parking = ParkedContexts(engine)
        engine.decode(n_tokens, 0)
        parking.switch(contexts[1], contexts[0])
        llama_cpp.llama_memory_seq_rm(engine.memory, 0, -1, -1)
        engine.decode(n_tokens, 0)
        turns = itertools.count()

        def switch():
            i = next(turns) % 2
            assert parking.switch(contexts[i], contexts[1 - i]).n_tokens == n_tokens

        benchmark.pedantic(switch, rounds=repeats(N_SWITCHES), warmup_rounds=10)
        benchmark.extra_info["switch_us"] = quartiles(1e6 * np.array(benchmark.stats.stats.data))
