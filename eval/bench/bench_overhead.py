"""Time that the patches add to a decode call, with no plugin enabled and with kv_chunks."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import pytest

from llmaas_eval.paired import repeats
from llmaas_eval.stats import median_interval

N_PAIRS = 10_000


@pytest.mark.parametrize("plugins", ["none", "kv_chunks"])
def bench_decode_call(model_tiny, benchmark, plugins, tmp_path):
    """Compare 10,000 one-token decodes through the wrapper and through the original, in turn."""
    import llama_cpp
    from llama_cpp import Llama

    from llmaas_plugins import activate

    original = llama_cpp.llama_decode
    table = {"kv_chunks": {"store": tmp_path}} if plugins == "kv_chunks" else {}
    added = []
    with activate({"plugins": table}):
        wrapped = llama_cpp.llama_decode
        assert wrapped is not original
        llama = Llama(str(model_tiny), n_ctx=256, n_threads=1, n_batch=8, verbose=False)
        with contextlib.closing(llama):
            llama.eval([1])

            def decode(function):
                llama._ctx.kv_cache_seq_rm(0, 1, -1)
                batch = llama._batch
                batch.set_batch([5], n_past=1, logits_all=False)
                started = time.perf_counter()
                assert function(llama.ctx, batch.batch) == 0
                return time.perf_counter() - started

            for i in range(repeats(N_PAIRS)):
                first, second = (original, wrapped) if i % 2 else (wrapped, original)
                one, two = decode(first), decode(second)
                added.append(two - one if i % 2 else one - two)
            benchmark.pedantic(decode, (wrapped,), rounds=repeats(100))
    median, low, high = median_interval(1e6 * np.array(added))
    benchmark.extra_info.update(added_us=median, added_us_low=low, added_us_high=high)
