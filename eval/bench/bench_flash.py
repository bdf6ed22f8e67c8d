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


def packed(model):
    """The packed file of a model; beside it."""
    path, tensors = packed_path(model), model_tensors(model)
    if not path.exists() or packed_problem(path, model, tensors):
        list(write_packed(model, path, tensors, repack))
    return path


@pytest.fixture(params=["1b", "moe"], scope="module")
def model(request):
    path = request.getfixturevalue(f"model_{request.param}")
    packed(path)
    return path


@contextlib.contextmanager
def both(model, share, **settings):
    """Ours and vanilla in groups of their own; and the budget."""
    budget = int(share * model.stat().st_size) // MIB * MIB
    table = {"memory_budget": budget, "arena": "16 MiB"}
    config = {"on_error": "raise", "plugins": {"flash_weights": table}}
    # repacked weights are no pages of the file: without memory for all of them vanilla is killed
    kinds = ((config, True), (None, share > 1))
    drop_pages(model)  # they are charged to whoever reads them first
    with contextlib.ExitStack() as stack:
        apps = []
        for own_config, repacks in kinds:
            group = stack.enter_context(memory_group())
            group.limit(budget)
            app = LimitedApp(model, group, own_config, SETTINGS | settings, repacks=repacks)
            apps.append(stack.enter_context(app))
        yield *apps, budget


@pytest.fixture(scope="module")
def compute_s(model):
    """Seconds a token of stock llama.cpp that has all the memory it wants."""
    with memory_group() as group, LimitedApp(model, group, None, SETTINGS) as app:
        app.generate(N_TOKENS)
        return min(app.generate(N_TOKENS) for _ in range(N_ROUNDS))


@pytest.mark.parametrize("share", SHARES)
def bench_exact(benchmark, model, compute_s, share):
    """Tokens one by one, vanilla and disk in turn."""
    with both(model, share) as (ours, stock, budget):
        for app in (ours, stock):  # what fits into memory is there afterwards
            for _ in range(2):
                app.generate(N_TOKENS)
        before, taken = ours.report()["models"], []

        def step():
            order = (ours, stock) if len(taken) % 2 else (stock, ours)
            rate = read_rate(packed(model))
            seconds = {app: app.generate(N_TOKENS) for app in order}
            rate = (rate + read_rate(packed(model))) / 2
            taken.append((seconds[ours], seconds[stock], rate))

        benchmark.pedantic(step, rounds=repeats(N_ROUNDS))
        after = ours.report()["models"]
        peak = ours.peak_bytes()
    ours_s, vanilla_s, rates = np.array(taken).T
    read = _per_token(before, after, "read_bytes", len(taken))
    others = peak - (after[0]["kept_bytes"] if after else 0)
    missing = max(0, model.stat().st_size + others - budget) if after else 0
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
        expert_hits=_per_token(before, after, "expert_hits", len(taken)),
        expert_misses=_per_token(before, after, "expert_misses", len(taken)),
    )
    assert peak <= budget


def _per_token(before, after, name, rounds):
    return (after[0][name] - before[0][name]) / (rounds * N_TOKENS) if after else 0


@pytest.mark.parametrize("share", [0.65])
def bench_drafted(benchmark, model_1b, share):
    """Drafts of four tokens, four fifths of them right: a pass reads what one token would."""
    packed(model_1b)
    with both(model_1b, share, logits_all=True) as (ours, stock, _):
        taken = []

        def step():
            apps = (ours, stock) if len(taken) % 2 else (stock, ours)
            seconds = {app: app.generate_drafted(16, at_a_time=4, accepted=0.8) for app in apps}
            taken.append((*seconds[ours], *seconds[stock]))

        benchmark.pedantic(step, rounds=repeats(3))
    ours_s, drafted_s, vanilla_s, vanilla_drafted_s = np.array(taken).T
    for name, other in (
        ("ours_alone", ours_s), ("vanilla", vanilla_s), ("vanilla_drafted", vanilla_drafted_s)
    ):  # fmt: skip
        speedup, low, high = median_interval(other / drafted_s)
        benchmark.extra_info[f"over_{name}"] = f"{speedup:.2f} ({low:.2f} to {high:.2f})"
    benchmark.extra_info["drafted_ms"] = quartiles(1e3 * drafted_s)
