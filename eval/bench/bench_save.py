"""Time to save a context: the part that the caller waits for, and the work in the background."""

from __future__ import annotations

import time

import pytest

from llmaas_eval.paired import compare
from llmaas_eval.stats import quartiles


@pytest.mark.parametrize("vanilla", ["vanilla_save", "cache_save"])
def bench_save(stored, benchmark, vanilla):
    """Compare our save, as the caller waits for it, with a state file or ``LlamaRAMCache``.

    ``behind_ms`` is our remaining work in the background.
    """
    behind = []

    def before():
        started = time.perf_counter()
        stored.settle()
        behind.append(time.perf_counter() - started)
        stored.forget()

    compare(benchmark, stored.save, getattr(stored, vanilla), before=before, rounds=10)
    benchmark.extra_info["behind_ms"] = quartiles([1e3 * s for s in behind if s > 1e-3])
