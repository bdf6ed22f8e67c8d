"""Time that the plugin deadlines adds to requests that name no latency."""

from __future__ import annotations

import contextlib
import time

import numpy as np
from llama_cpp import Llama

from llmaas_eval.paired import repeats
from llmaas_eval.stats import median_interval
from llmaas_plugins import activate

N_PAIRS, N_REQUESTS, N_ANSWER = 60, 3, 16


def bench_nothing_named(model_200m, benchmark):
    """Switch the plugin on and off between requests to one engine, as engines differ."""
    prompt = np.random.default_rng(0).integers(300, 1000, 48).tolist()
    ratios, texts = [], set()

    def seconds(plugins):
        """Return the least time of a few requests."""
        with activate({"on_error": "raise", "plugins": plugins}):
            return min(request() for _ in range(repeats(N_REQUESTS)))

    def request():
        llama.reset()
        began = time.perf_counter()
        reply = llama.create_completion(prompt, max_tokens=N_ANSWER, temperature=0.0)
        texts.add(reply["choices"][0]["text"])
        return time.perf_counter() - began

    def pair():
        order = [{}, {"deadlines": {}}][:: 1 if len(ratios) % 2 else -1]
        times = {len(plugins): seconds(plugins) for plugins in order}
        ratios.append(times[1] / times[0])

    with contextlib.closing(Llama(str(model_200m), n_ctx=256, n_threads=1, verbose=False)) as llama:
        benchmark.pedantic(pair, rounds=repeats(N_PAIRS), warmup_rounds=1)
    assert len(texts) == 1
    median, low, high = median_interval(np.array(ratios[1:]))
    benchmark.extra_info.update(ratio=median, ratio_low=low, ratio_high=high)
