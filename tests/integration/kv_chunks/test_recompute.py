"""Chunks that are lost, or slower to read than to compute, are recomputed in place."""

from __future__ import annotations

import contextlib

import llama_cpp
import numpy as np
import pytest
from landing import opener
from llama_cpp import Llama
from restoring import cells, leave_ram, lose, path_of, position_after, restore, transfer_of
from soak import scale
from switching import ask

from llmaas_plugins.kv_chunks.transfer.planning import LoadCosts

RNG = np.random.default_rng(5)
PROMPT = [1, *RNG.integers(300, 4000, 199).tolist()]  # 12 chunks and a half
FOREIGN = [1, *RNG.integers(300, 4000, 40).tolist()]
MORE = RNG.integers(300, 4000, 20).tolist()
CASES = {"V transposed": {}, "small batches": {"n_batch": 24, "flash_attn": True}}
BUDGETS = {"one segment": "256 MiB", "segments of one chunk": "1 MiB"}
ABORT = llama_cpp.ggml_abort_callback


@pytest.fixture(params=CASES)
def make(request, reference_model):
    settings = {"n_ctx": 256, "seed": 1, "verbose": False, "n_threads": 1, "n_threads_batch": 1}
    settings |= CASES[request.param]
    return lambda: contextlib.closing(Llama(str(reference_model), **settings))


@pytest.fixture
def make_one(reference_model):
    return opener(reference_model)


def split(missing, n_tokens, n_batch):
    """Return where batches begin if runs of these chunks are evaluated separately."""
    starts = set()
    for i in range(-(-n_tokens // 16)):
        if i == 0 or (i in missing) != (i - 1 in missing):
            begin = 16 * i
        if (16 * i - begin) % n_batch == 0 or i not in missing:
            starts.add(begin)
        starts |= set(range(begin, min(16 * i + 16, n_tokens), n_batch))
    return sorted(starts)


def vanilla_cells(llama, missing):
    """Return the cells of an engine that evaluates the same tokens in the same batches."""
    starts = split(missing, len(PROMPT), llama.n_batch)
    for start, end in zip(starts, [*starts[1:], len(PROMPT)], strict=True):
        llama.eval(PROMPT[start:end])
    return cells(llama)


PATTERNS = {
    "the first": {0},
    "three runs": {2, 3, 7, 11},
    "all but the last": set(range(12)),
}


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
@pytest.mark.parametrize("missing", PATTERNS.values(), ids=PATTERNS)
def test_recomputed_cells_are_vanillas_bit_by_bit(make, suite, missing, budget):
    """The context is made in the batches in which its missing chunks will be recomputed."""
    with make() as llama:
        expected = vanilla_cells(llama, missing)
    active = suite(ram_budget=budget)
    with make() as llama:
        starts = split(missing, len(PROMPT), llama.n_batch)
        for end in [*starts[1:], len(PROMPT)]:  # Llama keeps the prefix, and evaluates the rest
            next(llama.generate(PROMPT[:end], temp=0.0))
        ask(llama, FOREIGN, 1)
        lose(active, llama, PROMPT, missing)
        restored, found = restore(active, llama, PROMPT)
        assert restored.n_tokens == len(PROMPT)
        assert restored.n_recomputed == 16 * len(missing)
        assert restored.n_loaded == len(PROMPT) - 16 * len(missing)
        assert np.array_equal(found, expected)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(scale(4, 100)))
def test_any_pattern_gives_the_answer_of_vanilla(make_one, suite, seed):
    """Chunks are in RAM, on disk or lost; they are lossless, so only batch splits differ."""
    rng = np.random.default_rng(seed)
    with make_one() as llama:
        expected, rows = ask(llama, [*PROMPT, *MORE], 8)
    active = suite(recompute=True, ram_budget=rng.choice([*BUDGETS.values()]))
    with make_one() as llama:
        ask(llama, PROMPT, 1)
        ask(llama, FOREIGN, 1)
        leave_ram(active, llama, PROMPT, rng.choice(12, 6, replace=False))
        lose(active, llama, PROMPT, rng.choice(12, rng.integers(1, 8), replace=False))
        transfer_of(active, llama)._profile.costs = lambda: LoadCosts(
            0, 1e-6, 0, 0, rng.choice([1, 1e-9]), 0, 0
        )
        found, logits = ask(llama, [*PROMPT, *MORE], 8)
        assert found == expected
        assert np.abs(logits - rows).max() < 0.2  # vanilla's own difference between batch sizes
        ask(llama, FOREIGN, 1)
        assert all(
            not chunk.is_ghost for chunk in path_of(active, llama, PROMPT)
        )  # missing chunks are back


def test_earliest_chunks_are_recomputed_while_the_disk_is_slow(make_one, suite):
    active = suite(recompute=True)
    with make_one() as llama:
        ask(llama, PROMPT, 1)
        ask(llama, FOREIGN, 1)
        leave_ram(active, llama, PROMPT)
        transfer = transfer_of(active, llama)
        n_bytes = [chunk.size for chunk in path_of(active, llama, PROMPT)]
        per_chunk = sum(n_bytes) / len(n_bytes)
        transfer._profile.costs = lambda: LoadCosts(0, 1 / 16, 0, 0, 2 / per_chunk, 0, 0)
        restored, _ = restore(active, llama, PROMPT)
        assert 7 * 16 <= restored.n_recomputed <= 9 * 16  # two thirds
        assert restored.n_recomputed + restored.n_loaded == restored.n_tokens == len(PROMPT)
        assert restored.predicted_s == pytest.approx(8, abs=1)
        assert restored.actual_s < 8
        assert [chunk.ram >= 0 for chunk in path_of(active, llama, PROMPT)] == [
            16 * i >= restored.n_recomputed for i in range(13)
        ]


def test_nothing_is_loaded_where_evaluating_everything_is_faster(make_one, suite):
    active = suite(recompute=True)
    with make_one() as llama:
        ask(llama, PROMPT, 1)
        ask(llama, FOREIGN, 1)
        leave_ram(active, llama, PROMPT)
        transfer_of(active, llama)._profile.costs = lambda: LoadCosts(0, 1e-6, 0, 10, 0, 0, 0)
        before = cells(llama)
        restored, after = restore(active, llama, PROMPT)
        assert restored is None
        assert np.array_equal(before, after)


def test_costs_are_learned_from_use_and_outlive_the_process(packaged_model, suite):
    make_one = opener(packaged_model)  # a light model's chunks are too small
    active = suite(recompute=True)
    with make_one() as llama:
        ask(llama, PROMPT, 1)
        ask(llama, FOREIGN, 1)
        for _ in range(10):  # until enough was read
            assert transfer_of(active, llama)._profile.costs() is None
            leave_ram(active, llama, PROMPT)
            assert restore(active, llama, PROMPT)[0].n_recomputed == 0
            ask(llama, FOREIGN, 1)
            if transfer_of(active, llama)._profile.costs() is not None:
                break
        costs = transfer_of(active, llama)._profile.costs()
        assert max(costs[:3]) > 0  # which of them depends on noise
        ask(llama, [*PROMPT, *MORE], 1)  # saves
    active = suite(recompute=True)
    with make_one() as llama:
        ask(llama, FOREIGN, 1)
        restored, _ = restore(active, llama, PROMPT)
        assert restored.predicted_s > 0


def test_aborted_recompute_leaves_what_is_sound(make_one, suite):
    """The engine evaluates the rest as usual in a later request."""
    with make_one() as llama:
        expected, _ = ask(llama, [*PROMPT, *MORE], 8)
    active = suite(recompute=True)
    with make_one() as llama:
        ask(llama, PROMPT, 1)
        ask(llama, FOREIGN, 1)
        lose(active, llama, PROMPT, [3, 6])
        aborts = ABORT(lambda _: True)
        llama_cpp.llama_set_abort_callback(llama.ctx, aborts, None)
        restored, _ = restore(active, llama, PROMPT)
        assert (restored.n_tokens, restored.n_recomputed) == (48, 0)
        assert position_after(llama) == 48
        llama_cpp.llama_set_abort_callback(llama.ctx, ABORT(), None)
        assert ask(llama, [*PROMPT, *MORE], 8)[0] == expected
        assert all(not chunk.is_ghost for chunk in path_of(active, llama, PROMPT))


def test_interrupted_recompute_drops_the_cells(make_one, suite, monkeypatch):
    with make_one() as llama:
        expected, _ = ask(llama, [*PROMPT, *MORE], 8)
    active = suite(recompute=True)
    with make_one() as llama:
        ask(llama, PROMPT, 1)
        ask(llama, FOREIGN, 1)
        lose(active, llama, PROMPT, [3, 6])
        leave_ram(active, llama, PROMPT)
        with monkeypatch.context() as patch:
            patch.setattr("llmaas_plugins.kv_chunks.transfer.cell_loader.evaluate", interrupted)
            with pytest.raises(KeyboardInterrupt):
                ask(llama, PROMPT, 1)
        assert position_after(llama) == 0
        assert all(chunk.pins == 0 for chunk in path_of(active, llama, PROMPT))
        assert ask(llama, [*PROMPT, *MORE], 8)[0] == expected


def interrupted(*_):
    raise KeyboardInterrupt
