"""Levels of an elastic model: their speed, the time to change the level, and their memory.

*Block time* is a batch's time minus the parts that no level narrows: K and V projections, norms,
embeddings and the output matrix. Those parts are measured as an extra level without any query head
or neuron, hence without attention.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmaas_eval.batches import batches, loaded
from llmaas_eval.elastic.cutting import even_widths, write_cut
from llmaas_eval.elastic.gathering import Gather
from llmaas_eval.elastic.memory import peak_with
from llmaas_eval.elastic.prepared import variants
from llmaas_eval.elastic.random_adapters import (
    add_llama_cpps,
    random_terms,
    write_llama_cpps,
    write_random_adapters,
)
from llmaas_eval.elastic.switches import Switches
from llmaas_eval.elastic.timing import claiming, on, opened, prepared, seconds_of
from llmaas_eval.paired import repeats
from llmaas_eval.stats import median_interval, quartiles
from llmaas_plugins import activate
from llmaas_plugins.demo.page_cache import drop_pages
from llmaas_plugins.elastic.metadata import read_elastic
from llmaas_plugins.elastic.parts import part_claims
from llmaas_plugins.elastic.uniform import LEVELS
from llmaas_plugins.elastic.units import blocks_of, without_layers

NOTHING = len(LEVELS)
COPIED = 0.6
ADAPTED = (0.6, 0.5, 0.4, 0.3, 0.2)
RANK = 8


@pytest.fixture(scope="module")
def model(model_1b_elastic):
    return model_1b_elastic


@pytest.fixture(scope="module")
def variant(model):
    """Return a variant with the nine levels and, last, a level without any unit."""
    nine = variants(model, LEVELS)["uniform"]
    nothing = without_layers(nine.blocks, range(nine.blocks.n_layers))
    return replace(nine, levels=[*nine.levels, nothing])


def two_of_each(benchmark, theirs, ours, rounds):
    """Compare two contexts of ours with two of theirs, because memory layout affects speed.

    The layout depends on the order in which contexts are opened. A step is a pair: the function to
    time, and the function that restores the state before it.
    """
    steps, taken = [theirs[0], *ours, theirs[1]], []

    def one_round():
        order = range(4)[:: 1 if len(taken) % 2 else -1]
        seconds = {i: seconds_of(*steps[i]) for i in order}
        taken.append([seconds[i] for i in range(4)])

    one_round()
    taken.clear()
    benchmark.pedantic(one_round, rounds=repeats(rounds))
    seconds = np.array(taken)
    of_theirs, of_ours = np.sqrt(seconds[:, 0] * seconds[:, 3]), np.sqrt(seconds[:, 1:3].prod(1))
    ratio, low, high = median_interval(of_ours / of_theirs)
    benchmark.extra_info.update(
        ours_ms=quartiles(1e3 * of_ours),
        theirs_ms=quartiles(1e3 * of_theirs),
        ratio=f"{ratio:.3f} ({low:.3f} to {high:.3f})",
    )


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("what", ["token", 512])
def bench_full_level(benchmark, model, what, n_threads):
    """Compare the speed at level 100 % with vanilla's default build."""
    with contextlib.ExitStack() as stack:
        vanilla, ours = [], []
        for sides in (vanilla, vanilla, ours, ours):
            if sides is ours and not ours:
                stack.enter_context(activate({"on_error": "raise", "plugins": {"elastic": {}}}))
            context = batches(stack.enter_context(loaded(model)), on(n_threads))
            sides.append(prepared(stack.enter_context(context), what))
        two_of_each(benchmark, vanilla, ours, rounds=20)


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("what", ["token", 32, 64, 128, 256, 512])
def bench_levels(benchmark, variant, what, n_threads):
    """Measure four tokens after 512, or a prompt, by level (Fig 2).

    Block times are shares of the full level's block time.
    """
    with contextlib.ExitStack() as stack:
        context, native = opened(stack, claiming(stack), variant, n_threads)
        run, before = prepared(context, what)
        taken = []

        def one_round():
            seconds = np.empty(len(variant.levels))
            for level in range(len(seconds))[:: 1 if len(taken) % 2 else -1]:
                native.level = level
                seconds[level] = seconds_of(run, before)
            taken.append(seconds)

        one_round()
        taken.clear()
        benchmark.pedantic(one_round, rounds=repeats(20 if what == "token" else 8))
    seconds = np.array(taken) / (4 if what == "token" else 1)
    full, nothing = seconds[:, 0], seconds[:, NOTHING]
    over = []
    for i, level in enumerate(LEVELS):
        share, low, high = median_interval((seconds[:, i] - nothing) / (full - nothing))
        benchmark.extra_info[f"{level:.0%}"] = {
            "ms": quartiles(1e3 * seconds[:, i]),
            "of full": f"{np.median(seconds[:, i] / full):.3f}",
            "block time": f"{share:.3f} ({low:.3f} to {high:.3f})",
        }
        over.append(share - level)
    benchmark.extra_info["worst block time over level"] = max(over)
    benchmark.extra_info["nothing ms"] = quartiles(1e3 * nothing)


@pytest.mark.parametrize("what", ["token", 256])
def bench_biases(benchmark, variant, what):
    """Compare level 50 % with and without biases that compensate for omitted units."""
    shape = len(variant.levels), variant.blocks.n_embd
    biases = {
        f"blk.{layer}.{matrix}.weight": np.ones(shape, np.float32)
        for layer in range(variant.blocks.n_layers)
        for matrix in ("attn_output", "ffn_down")
    }
    with contextlib.ExitStack() as stack:
        claimer, without, ours = claiming(stack), [], []
        for sides in (without, ours, ours, without):
            one = variant if sides is without else replace(variant, biases=biases)
            context, native = opened(stack, claimer, one, 2)
            native.level = LEVELS.index(0.5)
            sides.append(prepared(context, what))
        two_of_each(benchmark, without, ours, rounds=30)


@pytest.mark.parametrize("what", ["token", 256])
def bench_adapters(benchmark, variant, what):
    """Compare narrow levels with and without adapters of rank 8, and with llama.cpp's own.

    All run on the same weights. Levels beyond the last one have the same widths and adapters.
    llama.cpp's adapter is of the whole weights, in F16.
    """
    picks = [LEVELS.index(level) for level in ADAPTED]
    levels = [variant.levels[0], *(2 * [variant.levels[pick] for pick in picks])]
    first = 1 + len(picks)
    terms = {i: random_terms(variant.blocks, levels[i], RANK) for i in range(first, len(levels))}
    taken = []
    with contextlib.ExitStack() as stack:
        claimer = claiming(stack)
        claimer.claims = part_claims(variant.blocks, levels, adapters=terms)
        model = stack.enter_context(loaded(variant.path))
        del terms
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        own = write_llama_cpps(folder / "own.gguf", variant.blocks, variant.levels[0], RANK)
        steps = [prepared(stack.enter_context(batches(model, on(2))), what) for _ in range(2)]
        ours, theirs = claimer.contexts[-2:]
        add_llama_cpps(model, theirs.ctx, own)
        sides = [(steps[0], ours, 1), (steps[0], ours, first), (steps[1], theirs, 1)]

        def one_round():
            seconds = np.empty((len(picks), len(sides)))
            for i in range(len(picks)):
                for side in range(len(sides))[:: 1 if len(taken) % 2 else -1]:
                    step, native, start = sides[side]
                    native.level = start + i
                    seconds[i, side] = seconds_of(*step)
            taken.append(seconds)

        one_round()
        taken.clear()
        benchmark.pedantic(one_round, rounds=repeats(20 if what == "token" else 8))
    for level, seconds in zip(ADAPTED, np.array(taken).transpose(1, 2, 0), strict=True):
        plain, *others = seconds
        benchmark.extra_info[f"{level:.0%}"] = {
            "ms": quartiles(1e3 * plain / (4 if what == "token" else 1)),
            **{
                name: "{:.3f} ({:.3f} to {:.3f})".format(*median_interval(one / plain))
                for name, one in zip(("adapters", "llama.cpp's"), others, strict=True)
            },
        }


@pytest.fixture(scope="module")
def adapted(model):
    """Return a copy of the prepared model with adapters of all levels."""
    path = model.with_stem(f"{model.stem}-adapted")
    if not path.exists():
        shutil.copyfile(model, path)
        write_random_adapters(path, RANK)
    return path


@pytest.mark.parametrize("kind", ["plain", "adapted"])
def bench_switching(benchmark, request, model, kind):
    """Measure the time from setting a level to the next decode's start, and that decode.

    Levels are random. Each round has three requests. The first keeps the previous level and does
    not count, as it absorbs side effects of pytest-benchmark. The second switches the level. The
    third keeps the new level.
    """
    rng, levels = np.random.default_rng(0), [1.0]
    with contextlib.ExitStack() as stack:
        path = model if kind == "plain" else request.getfixturevalue("adapted")
        app, taken = Switches(stack, path), []

        def one_round():
            level = rng.choice([one for one in LEVELS if [one] != levels[-1:]])
            levels.append(float(level))
            app.request(levels[-2])
            taken.append([app.request(levels[-1]) for _ in range(2)])

        benchmark.pedantic(one_round, rounds=repeats(400))
    (switch_s, first_s), (stay_s, second_s) = np.array(taken).transpose(1, 2, 0)
    for name, seconds in (("switch_us", switch_s), ("no_switch_us", stay_s)):
        p50, p99 = np.percentile(1e6 * seconds, [50, 99])
        benchmark.extra_info[name] = f"p50 {p50:.4g}, p99 {p99:.4g}"
    ratio, low, high = median_interval(first_s / second_s)
    benchmark.extra_info["decode_over_next"] = f"{ratio:.3f} ({low:.3f} to {high:.3f})"


def bench_copying(benchmark, model):
    """Measure other ways to switch to 60 % (Fig 16b).

    One way copies the units from their places in a model without reordering, in one thread. The
    other loads a model file with only these units and creates a context.
    """
    widths = even_widths(blocks_of(model), COPIED)
    taken = {"copy": [], "load, page cache": [], "load, dropped cache": []}
    with tempfile.TemporaryDirectory(dir=model.parent) as folder:
        cut = write_cut(model, widths, Path(folder) / "cut.gguf")
        steps = {
            "copy": (Gather(model, widths), lambda: None),
            "load, page cache": (functools.partial(load, cut), cut.read_bytes),
            "load, dropped cache": (functools.partial(load, cut), lambda: drop_pages(cut)),
        }

        def one_round():
            for name, step in steps.items():
                taken[name].append(seconds_of(*step))

        benchmark.pedantic(one_round, rounds=repeats(10))
        benchmark.extra_info["mib"] = cut.stat().st_size >> 20
    for name, seconds in taken.items():
        benchmark.extra_info[f"{name}, ms"] = quartiles(1e3 * np.array(seconds))


def load(path):
    with loaded(path) as model, batches(model):
        pass


def bench_memory(benchmark, model):
    """Measure the peak memory of a process with all nine levels (Fig 16a).

    One process has one model with levels; another has one model file per level.
    """
    blocks, taken = blocks_of(model), []

    def one_round():
        taken.append((peak_with([model], LEVELS), peak_with([model])))

    with tempfile.TemporaryDirectory(dir=model.parent) as folder:
        copies = [
            write_cut(model, even_widths(blocks, level), Path(folder) / f"{level}.gguf")
            for level in LEVELS
        ]
        benchmark.pedantic(one_round, rounds=repeats(3))
        copied = peak_with(copies)
    ours, stock = np.median(np.array(taken), axis=0)
    benchmark.extra_info.update(
        vanilla_mib=stock / 2**20,
        ours_mib=ours / 2**20,
        copies_mib=copied / 2**20,
        ours_over_vanilla=ours / stock,
        copies_over_vanilla=copied / stock,
    )


def bench_adapter_memory(benchmark, model, adapted):
    """Compare the peak memory of a process with all levels, with and without their adapters."""
    taken = []

    def one_round():
        taken.append((peak_with([adapted], LEVELS), peak_with([model], LEVELS)))

    benchmark.pedantic(one_round, rounds=repeats(3))
    ours, without = np.median(np.array(taken), axis=0)
    n_bytes = sum(one.n_bytes for one in read_elastic(adapted).adapters.values())
    benchmark.extra_info.update(
        adapted_mib=ours / 2**20,
        without_mib=without / 2**20,
        adapters_mib=n_bytes / 2**20,
        adapters_over_peak=n_bytes / ours,
        adapted_over_without=ours / without,
    )
