"""Calls that go on with one of a few contexts in an engine's cells, against plain sequences.

The plain app gives each context a sequence of its own in one llama.cpp context, and decodes with
the number of another one. ``Llama`` has its contexts parked by ``kv_chunks``. Both evaluate a few
tokens and sample one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from typing import Any

import llama_cpp
import numpy as np
import pytest
from llama_cpp import Llama

from llmaas_eval.paired import repeats
from llmaas_eval.stats import median_interval
from llmaas_hooks import hookimpl
from llmaas_plugins import activate

N_NEW, N_ROUNDS = 16, 40
"""Tokens that a call adds, and rounds of calls."""
N_CTX = 5632
PAUSE_S = 0.02
"""Time between calls, in which nothing is left to do behind the last one."""


FIGURES = (
    "plain_ms",
    "stay_ms",
    "switch_ms",
    "over_plain_ms",
    "over_stay_ms",
    "latency_ms",
    "stay_latency_ms",
)
"""Figures of a case. A call's latency is the time until it can evaluate."""


class Plain:
    """App with a sequence for each context, by llama.cpp's bindings as they were on import."""

    def __init__(self, path, prompts, n_threads):
        self._decode = llama_cpp.llama_decode
        self._sample = llama_cpp.llama_sampler_sample
        self._model = llama_cpp.llama_model_load_from_file(
            os.fsencode(path), llama_cpp.llama_model_default_params()
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = N_CTX, len(prompts), True
        params.n_threads = params.n_threads_batch = n_threads
        self._ctx = llama_cpp.llama_init_from_model(self._model, params)
        self._batch = llama_cpp.llama_batch_init(512, 0, 1)
        self._sampler = llama_cpp.llama_sampler_init_greedy()
        self._ends = [0] * len(prompts)
        for i, prompt in enumerate(prompts):
            for start in range(0, len(prompt), 512):
                self.answer(i, prompt[start : start + 512])

    def answer(self, i, tokens):
        """Evaluate tokens in a context, and sample one."""
        batch, end = self._batch, self._ends[i]
        batch.n_tokens = len(tokens)
        for k, token in enumerate(tokens):
            batch.token[k], batch.pos[k] = int(token), end + k
            batch.n_seq_id[k], batch.seq_id[k][0] = 1, i
            batch.logits[k] = k == len(tokens) - 1
        assert self._decode(self._ctx, batch) == 0
        self._ends[i] = end + len(tokens)
        self._sample(self._sampler, self._ctx, -1)

    def seconds(self, i, tokens):
        """Return the seconds of ``answer`` after a pause."""
        time.sleep(PAUSE_S)
        started = time.perf_counter()
        self.answer(i, tokens)
        return time.perf_counter() - started

    def close(self):
        llama_cpp.llama_sampler_free(self._sampler)
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._ctx)
        llama_cpp.llama_model_free(self._model)


class Latencies:
    """Plugin that keeps the switch latency of the last request."""

    last_s = 0.0

    @hookimpl
    def llmaas_request_end(self, stats: Any) -> None:
        self.last_s = stats.prepare_s


@contextlib.contextmanager
def opened(path, folder, codec, n_threads):
    """Open a ``Llama`` with cells for all contexts; yield it and its latencies."""
    latencies = Latencies()
    table = {
        "store": str(folder / "kv"),
        "codec": codec,
        "parked_tokens": N_CTX,
        "ram_budget": "512 MiB",
        "disk_budget": 0,
    }
    config = {"on_error": "raise", "plugins": {"kv_chunks": table}}
    engine = {"n_ctx": N_CTX, "n_threads": n_threads, "flash_attn": True, "verbose": False}
    with (
        activate(config, {"latencies": latencies}) as suite,
        contextlib.closing(Llama(str(path), **engine)) as llama,
    ):
        yield suite, llama, latencies


@pytest.mark.parametrize("codec", ["int8", "tolerance"])
@pytest.mark.parametrize(("n_contexts", "n_tokens"), [(2, 1000), (2, 2000), (4, 500)])
@pytest.mark.parametrize("model", ["reference_model", "model_1b"])
def bench_call_of_another_context(  # noqa: PLR0913, PLR0917  fixtures and parameters
    request, benchmark, tmp_path, model, n_contexts, n_tokens, codec
):
    """Measure calls of contexts in turn, and calls that stay in one, in the same rounds."""
    path, rng = request.getfixturevalue(model), np.random.default_rng(0)
    n_threads = len(os.sched_getaffinity(0))
    texts = [rng.integers(300, 4000, n_tokens).tolist() for _ in range(n_contexts)]
    with (
        contextlib.closing(Plain(path, texts, n_threads)) as plain,
        opened(path, tmp_path, codec, n_threads) as (suite, llama, latencies),
    ):

        def new():
            return rng.integers(300, 4000, N_NEW).tolist()

        def timed(i):
            texts[i] += new()
            time.sleep(PAUSE_S)
            llama_cpp.llama_memory_seq_pos_max(llama_cpp.llama_get_memory(llama.ctx), 0)  # waits
            started = time.perf_counter()
            stream = llama.generate(texts[i], temp=0.0)
            next(stream)
            seconds = time.perf_counter() - started
            stream.close()
            return seconds, latencies.last_s

        turns = itertools.cycle(range(n_contexts))
        for i in itertools.islice(turns, 2 * n_contexts):  # until each context was parked
            timed(i)
        rounds = []
        for _ in range(repeats(N_ROUNDS)):
            i = next(turns)
            switched, latency_s = timed(i)
            stayed, stay_s = timed(i)
            times = [plain.seconds(i, new()), stayed, switched]
            rounds.append([*times, switched - times[0], switched - stayed, latency_s, stay_s])
        n_taken = suite.status()["plugins"]["kv_chunks"]["takes"]
        assert n_taken >= repeats(N_ROUNDS)
        benchmark.pedantic(timed, (next(turns),), rounds=1)
    columns = 1e3 * np.array(rounds).T
    for name, column in zip(FIGURES, columns, strict=True):
        median, low, high = median_interval(column)
        benchmark.extra_info[name] = f"{median:.3f} ({low:.3f} to {high:.3f})"
