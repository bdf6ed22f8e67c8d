"""Models larger than memory: ours against vanilla's best, both in a memory cgroup of the budget.

The budget is the whole process's, page cache included, and is given as a share of the model file's
size. What bounds us is reading what does not fit, so the disk's rate is measured in turn with both:
the *floor* of a token is the longer of computing it and reading that.
"""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from llmaas_eval.paired import quartiles, repeats
from llmaas_eval.streamed import LimitedApp
from llmaas_eval.switching.groups import can_limit_memory, memory_group
from llmaas_patches.native.packing import model_tensors, repack
from llmaas_plugins._native import read_rate
from llmaas_plugins.demo.interval import median_interval
from llmaas_plugins.demo.page_cache import drop_pages
from llmaas_plugins.flash_weights.packed import packed_path, packed_problem, write_packed

SHARES = (0.4, 0.5, 0.65, 0.8, 1.0, 1.6)
"""The last has room for all of it."""
N_TOKENS, N_ROUNDS = 6, 5
SETTINGS = {"n_ctx": 512, "n_batch": 128, "n_ubatch": 128}
MIB = 1 << 20

pytestmark = pytest.mark.skipif(not can_limit_memory(), reason="no writable cgroup v1 memory")


@pytest.fixture(scope="module")
def packed_1b(model_1b):
    """The packed file of the 1 B shape; beside it."""
    path, tensors = packed_path(model_1b), model_tensors(model_1b)
    if not path.exists() or packed_problem(path, model_1b, tensors):
        list(write_packed(model_1b, path, tensors, repack))
    return path


@pytest.fixture(scope="module")
def compute_s(model_1b):
    """Seconds a token of stock llama.cpp that has all the memory it wants."""
    with memory_group() as group, LimitedApp(model_1b, group, None, SETTINGS) as app:
        app.generate(N_TOKENS)
        return min(app.generate(N_TOKENS) for _ in range(N_ROUNDS))


@pytest.mark.parametrize("share", SHARES)
def bench_exact(benchmark, model_1b, packed_1b, compute_s, share):
    """Tokens one by one, vanilla and disk in turn."""
    budget = int(share * model_1b.stat().st_size) // MIB * MIB
    table = {"memory_budget": budget, "arena": "16 MiB"}
    config = {"on_error": "raise", "plugins": {"flash_weights": table}}
    # repacked weights are no pages of the file: without memory for all of them vanilla is killed
    kinds = ((config, True), (None, share > 1))
    with contextlib.ExitStack() as stack:
        apps = []
        drop_pages(model_1b)  # they are charged to whoever reads them first
        for own_config, repacks in kinds:
            group = stack.enter_context(memory_group())
            group.limit(budget)
            app = LimitedApp(model_1b, group, own_config, SETTINGS, repacks=repacks)
            apps.append(stack.enter_context(app))
        ours, stock = apps
        for app in apps:  # what fits into memory is there afterwards
            for _ in range(2):
                app.generate(N_TOKENS)
        before, taken = ours.report()["models"], []

        def step():
            order = (ours, stock) if len(taken) % 2 else (stock, ours)
            rate = read_rate(packed_1b)
            seconds = {app: app.generate(N_TOKENS) for app in order}
            rate = (rate + read_rate(packed_1b)) / 2
            taken.append((seconds[ours], seconds[stock], rate))

        benchmark.pedantic(step, rounds=repeats(N_ROUNDS))
        after = ours.report()["models"]
        peak = ours.peak_bytes()
    ours_s, vanilla_s, rates = np.array(taken).T
    read = _per_token(before, after, "read_bytes", len(taken))
    others = peak - (after[0]["kept_bytes"] if after else 0)
    missing = max(0, model_1b.stat().st_size + others - budget) if after else 0
    floor_s = np.maximum(compute_s, missing / rates)
    speedup, low, high = median_interval(vanilla_s / ours_s)
    benchmark.extra_info.update(
        budget_mib=budget // MIB,
        peak_mib=peak // MIB,
        ours_ms=quartiles(1e3 * ours_s),
        vanilla_ms=quartiles(1e3 * vanilla_s),
        speedup=speedup,
        speedup_low=low,
        speedup_high=high,
        floor_ms=quartiles(1e3 * floor_s),
        over_floor=float(np.median(ours_s / floor_s)),
        disk_gb_s=quartiles(rates / 1e9),
        read_mb=read / 1e6,
        reading_s=float(np.median(read / rates / ours_s)),
        stalled_ms=_per_token(before, after, "stalled_ns", len(taken)) / 1e6,
        kept_mib=after[0]["kept_bytes"] // MIB if after else 0,
    )
    assert peak <= budget


def _per_token(before, after, name, rounds):
    return (after[0][name] - before[0][name]) / (rounds * N_TOKENS) if after else 0
