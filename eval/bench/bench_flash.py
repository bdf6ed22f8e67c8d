"""Models larger than memory: ours against vanilla's best setting, each in a memory cgroup.

The budget limits the whole process with its page cache; it is a share of the model file's size. Our
speed is bounded by reading the weights that do not fit, so the disk's rate is measured in every
round. The *floor* of a token is the longer of two times: computing the token with all memory, and
reading those weights.
"""

from __future__ import annotations

import contextlib
import os

import numpy as np
import pytest

from llmaas_eval.paired import repeats
from llmaas_eval.sparse.ours import add_channels
from llmaas_eval.stats import median_interval, quartiles
from llmaas_eval.streamed import LimitedApp
from llmaas_eval.switching.groups import can_limit_memory, memory_group
from llmaas_patches.native.packing import model_tensors, repack
from llmaas_plugins._native import read_rate
from llmaas_plugins.demo.page_cache import drop_pages
from llmaas_plugins.flash_weights.channels import channel_path
from llmaas_plugins.flash_weights.packed import packed_path, packed_problem, write_packed

SHARES = (0.3, 0.4, 0.5, 0.65, 0.8, 1.0)
N_TOKENS, N_ROUNDS = 6, 5
SETTINGS = {"n_ctx": 512, "n_batch": 128, "n_ubatch": 128}
MIB = 1 << 20

pytestmark = pytest.mark.skipif(not can_limit_memory(), reason="no writable cgroup v1 memory")


def packed(model):
    """Return the path of a model's packed file, next to the model; write it if necessary."""
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
def limited(model, share, tables, **settings):
    """Open apps by name, each in its own memory group, and yield them with the budget in bytes.

    An app runs vanilla if its table is None, else ``flash_weights`` with the table's settings.
    """
    budget = int(share * model.stat().st_size) // MIB * MIB
    drop_pages(model)  # a page counts for the group that reads it first
    with contextlib.ExitStack() as stack:
        apps = {}
        for name, table in tables.items():
            group = stack.enter_context(memory_group())
            group.limit(budget)
            own = {"memory_budget": budget, "arena": "16 MiB"}
            plugins = {"flash_weights": own | table} if table is not None else None
            config = {"on_error": "raise", "plugins": plugins} if plugins else None
            # Repacked weights are not pages of the file, so they cannot be reclaimed. With less
            # memory than they need, vanilla would be killed.
            repacks = bool(plugins) or share > 1
            app = LimitedApp(model, group, config, SETTINGS | settings, repacks=repacks)
            apps[name] = stack.enter_context(app)
        yield apps, budget


@contextlib.contextmanager
def both(model, share, **settings):
    """Open an app of ours and a vanilla app; yield both and the budget in bytes."""
    with limited(model, share, {"ours": {}, "vanilla": None}, **settings) as (apps, budget):
        yield *apps.values(), budget


@pytest.fixture(scope="module")
def compute_s(model):
    """Return seconds per token of stock llama.cpp without a memory limit."""
    with memory_group() as group, LimitedApp(model, group, None, SETTINGS) as app:
        app.generate(N_TOKENS)
        return min(app.generate(N_TOKENS) for _ in range(N_ROUNDS))


@pytest.mark.parametrize("share", SHARES)
def bench_exact(benchmark, model, compute_s, share):
    """Measure tokens one by one; ours, vanilla and the disk's rate are measured in turn."""
    with both(model, share) as (ours, stock, budget):
        for app in (ours, stock):  # warm up: load the weights that fit into memory
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
    missing = max(0, model.stat().st_size + peak - after[0]["kept_bytes"] - budget)
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
        kept_mib=after[0]["kept_bytes"] // MIB,
        expert_hits=_per_token(before, after, "expert_hits", len(taken)),
        expert_misses=_per_token(before, after, "expert_misses", len(taken)),
    )
    assert peak <= budget


def bench_fits(benchmark, model_1b):
    """Compare both on a model that fits into memory, which the plugin leaves alone.

    Equal processes differ in speed, so there are two of each. A further process is opened first and
    not counted, because the first is always the slowest.
    """
    names = "ours", "vanilla", "vanilla again", "ours again"
    tables = {"first": None} | {name: {} if "ours" in name else None for name in names}
    with limited(model_1b, 1.6, tables) as (apps, budget):
        for app in apps.values():
            for _ in range(2):
                app.generate(N_TOKENS)
        taken = []

        def step():
            order = names if len(taken) % 2 else names[::-1]
            seconds = {name: apps[name].generate(N_TOKENS) for name in order}
            taken.append([seconds[name] for name in names])

        benchmark.pedantic(step, rounds=repeats(2 * N_ROUNDS))
        assert apps["ours"].report()["left_alone"]
        peak = apps["ours"].peak_bytes()
    seconds = np.array(taken)
    ours_s, vanilla_s = (
        np.sqrt(seconds[:, 0] * seconds[:, 3]),
        np.sqrt(seconds[:, 1] * seconds[:, 2]),
    )
    speedup, low, high = median_interval(vanilla_s / ours_s)
    benchmark.extra_info.update(
        budget_mib=budget // MIB,
        peak_mib=peak // MIB,
        ours_ms=quartiles(1e3 * ours_s),
        vanilla_ms=quartiles(1e3 * vanilla_s),
        speedup=f"{speedup:.3f} ({low:.3f} to {high:.3f})",
        each_ms={name: quartiles(1e3 * own) for name, own in zip(names, seconds.T, strict=True)},
    )


def _per_token(before, after, name, rounds):
    return (after[0][name] - before[0][name]) / (rounds * N_TOKENS)


@pytest.mark.parametrize("share", [0.65])
def bench_drafted(benchmark, model_1b, share):
    """Measure drafts of four tokens, each correct with probability 0.8.

    One pass over a draft reads the same weights as one token.
    """
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


@pytest.fixture(params=["random", "local"], scope="module")
def sparse_model(request):
    """Return a model with equally active channels, or one whose activity differs as in training.

    ``local`` is the model of ``model_1b_local``.
    """
    names = {"random": "model_1b", "local": "model_1b_local"}
    return with_channels(request.getfixturevalue(names[request.param]))


@pytest.mark.parametrize("share", [0.5, 0.8])
def bench_prompt(benchmark, model_1b, share):
    """Compare prompts of 384 tokens in batches of 128; vanilla and ours run in turn."""
    packed(model_1b)
    with both(model_1b, share) as (ours, stock, _):
        compare_prompts(benchmark, ours, stock)


@pytest.mark.parametrize("share", [0.8, 1.4, 2.4])
def bench_sparse_prompt(benchmark, model_1b_local, share):
    """Compare the same prompts in the sparse mode, with six tokens of an answer after each.

    At share 0.8 most columns are in memory, at 1.4 some of the prompts' weights, and at 2.4 all.
    """
    tables = {"ours": {"mode": "sparse"}, "vanilla": None}
    with limited(with_channels(model_1b_local), share, tables) as (apps, budget):
        compare_prompts(benchmark, *apps.values(), n_answer=N_TOKENS, n_rounds=4 * N_ROUNDS)
        report = apps["ours"].report()["models"][0]
        peak = apps["ours"].peak_bytes()
    benchmark.extra_info.update(
        budget_mib=budget // MIB,
        peak_mib=peak // MIB,
        kept=report["kept_bytes"] / report["bytes"],
        prompt_kept=report["prompt_kept_bytes"] / report["prompt_bytes"],
    )


def compare_prompts(benchmark, ours, stock, n_answer=0, n_rounds=N_ROUNDS):
    """Measure prompts of two apps in turn, each followed by ``n_answer`` tokens."""
    taken = []

    def prompt_s(app):
        seconds = app.prompt(384)
        if n_answer:
            app.generate(n_answer)
        return seconds

    def step():
        order = (ours, stock) if len(taken) % 2 else (stock, ours)
        seconds = {app: prompt_s(app) for app in order}
        taken.append((seconds[ours], seconds[stock]))

    step()
    taken.clear()
    benchmark.pedantic(step, rounds=repeats(n_rounds))
    ours_s, vanilla_s = np.array(taken).T
    speedup, low, high = median_interval(vanilla_s / ours_s)
    benchmark.extra_info.update(
        ours_s=quartiles(ours_s),
        vanilla_s=quartiles(vanilla_s),
        speedup=f"{speedup:.2f} ({low:.2f} to {high:.2f})",
    )


SPARSE_TABLES = {
    "vanilla": None,
    "exact": {},
    "sparse": {"mode": "sparse"},
    "shared": {"mode": "sparse", "cache": "shared"},
    "busiest": {"mode": "sparse", "cache": "busiest"},
    "layer": {"mode": "sparse", "cache": "layer"},
    "top_k": {"mode": "sparse", "selection": "top_k"},
}


@pytest.mark.parametrize("share", [0.6, 1.8])
def bench_sparse(benchmark, sparse_model, share):
    """Measure random tokens with half of the channels, compared with vanilla and exact mode.

    At share 1.8, all weights are in memory.
    """
    with limited(sparse_model, share, SPARSE_TABLES) as (apps, budget):
        in_turns(benchmark, apps, budget)


@pytest.mark.parametrize("sparsity", [0.5, 0.6, 0.7, 0.8])
@pytest.mark.parametrize("share", [0.6, 1.8])
def bench_sparsity(benchmark, model_1b_local, share, sparsity):
    """Measure the speed of tokens by memory and by share of omitted channels (Fig 14)."""
    with_channels(model_1b_local)
    table = {"mode": "sparse", "sparsity": sparsity}
    tables = {"vanilla": None, "sparse": table, "busiest": table | {"cache": "busiest"}}
    with limited(model_1b_local, share, tables) as (apps, budget):
        in_turns(benchmark, apps, budget)


ON_DEMAND = {"mode": "sparse", "cache": "busiest"}
LEVERS = {
    "vanilla": {"": None},
    "streamed": {"": {"mode": "sparse"}},
    "on demand": {
        "": ON_DEMAND,
        "top_k": ON_DEMAND | {"selection": "top_k"},
        "shared": ON_DEMAND | {"cache": "shared"},
        "layer": ON_DEMAND | {"cache": "layer"},
        "preload": ON_DEMAND | {"preload": True},
        "depth 1": ON_DEMAND | {"queue_depth": 1},
        "depth 4": ON_DEMAND | {"queue_depth": 4},
        "depth 16": ON_DEMAND | {"queue_depth": 16},
        "gap 0": ON_DEMAND | {"read_gap": 0},
        "gap 64K": ON_DEMAND | {"read_gap": "64 KiB"},
    },
    "2 layers": {"": ON_DEMAND, "preload": ON_DEMAND | {"preload": True}},
    "4 layers": {
        "": ON_DEMAND,
        "preload": ON_DEMAND | {"preload": True},
        "all of the paper's": ON_DEMAND | {"cache": "layer", "preload": True, "selection": "top_k"},
    },
}
"""Settings of each option alone, or with the options that it needs, by name (Figs 16, 17)."""


def bench_levers(benchmark, model_1b_local):
    """Measure each option of the sparse mode with memory for 60 % of the model."""
    with contextlib.ExitStack() as stack:
        apps = {}
        for name, tables in LEVERS.items():
            n_layers = int(name[0]) if name[0].isdigit() else 1
            model = with_channels(model_1b_local, n_layers)
            own, budget = stack.enter_context(limited(model, 0.6, tables))
            apps |= {f"{name} {lever}".strip(): app for lever, app in own.items()}
        in_turns(benchmark, apps, budget)


def with_channels(model, group_layers=1):
    """Return a model whose channel file groups ``group_layers`` layers; write the file if needed.

    For more than one layer, the returned path is a hard link to the model.
    """
    path = model
    if group_layers > 1:
        path = model.with_stem(f"{model.stem}-{group_layers}-layers")
        path.unlink(missing_ok=True)
        os.link(model, path)
    packed(path)
    if not channel_path(path).exists():
        tokens = np.random.default_rng(1).integers(300, 4096, (4, 512))
        add_channels(path, tokens, group_layers)
    return path


def in_turns(benchmark, apps, budget):
    """Measure tokens of all apps in turn, with the plugin's statistics for apps of ours."""
    for app in apps.values():
        app.read(24)
    before, taken = {name: _models(name, app) for name, app in apps.items()}, []

    def step():
        order = list(apps)[:: 1 if len(taken) % 2 else -1]
        seconds = {name: apps[name].read(N_TOKENS) for name in order}
        taken.append([seconds[name] for name in apps])

    benchmark.pedantic(step, rounds=repeats(N_ROUNDS))
    seconds = dict(zip(apps, np.array(taken).T, strict=True))
    benchmark.extra_info["budget_mib"] = budget // MIB
    for name, own in seconds.items():
        speedup, low, high = median_interval(seconds["vanilla"] / own)
        info = {"ms": quartiles(1e3 * own), "speedup": f"{speedup:.2f} ({low:.2f} to {high:.2f})"}
        after = _models(name, apps[name])
        if after:
            info |= _used(before[name], after, len(taken))
            info["peak_mib"] = apps[name].peak_bytes() // MIB
            assert info["peak_mib"] * MIB <= budget
        benchmark.extra_info[name] = info


def _models(name, app):
    return [] if name == "vanilla" else app.report()["models"]


def _used(before, after, rounds):
    names = ("channel_hits", "channel_misses", "read_bytes", "wasted_bytes", "stalled_ns")
    hits, misses, read, wasted, stalled = (
        _per_token(before, after, name, rounds) for name in names
    )
    return {
        "hits": hits / max(1, hits + misses),
        "read_mb": read / 1e6,
        "wasted_mb": wasted / 1e6,
        "stalled_ms": stalled / 1e6,
    }
