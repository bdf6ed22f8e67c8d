"""Keeping the context: what its caller waits for, and the work behind the reply."""

from __future__ import annotations

import time

import pytest

from llmaas_eval.paired import compare, quartiles


@pytest.mark.parametrize("vanilla", ["vanilla_save", "cache_save"])
def bench_save(stored, benchmark, vanilla):
    """Ours on the caller's path against a state file or ``LlamaRAMCache``; ``behind`` beside it."""
    behind = []

    def before():
        started = time.perf_counter()
        stored.settle()
        behind.append(time.perf_counter() - started)
        stored.forget()

    compare(benchmark, stored.save, getattr(stored, vanilla), before=before, rounds=10)
    benchmark.extra_info["behind_ms"] = quartiles([1e3 * s for s in behind if s > 1e-3])
