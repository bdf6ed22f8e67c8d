"""Keeping the context: what its caller waits for, and the work behind the reply."""

from __future__ import annotations

import time

import numpy as np

from llmaas_eval.paired import compare


def bench_save(stored, benchmark):
    """Ours on the caller's path against ``llama_state_seq_save_file``; ``behind`` beside it."""
    behind = []

    def before():
        started = time.perf_counter()
        stored.settle()
        behind.append(time.perf_counter() - started)
        stored.forget()

    compare(benchmark, stored.save, stored.vanilla_save, before=before, rounds=10)
    benchmark.extra_info["behind_ms"] = 1e3 * float(np.median([s for s in behind if s > 1e-3]))
