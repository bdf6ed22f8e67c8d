"""Plans are optimal, and costs equal the measured ones."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmaas_plugins.kv_chunks.store.chunk_ids import ChunkId
from llmaas_plugins.kv_chunks.store.tree import ABSENT, Chunk
from llmaas_plugins.kv_chunks.transfer.cost_profile import CostProfile, LinearFit
from llmaas_plugins.kv_chunks.transfer.planning import (
    LoadCosts,
    LoadWork,
    best_cut,
    cut_delays,
    plan_load,
)

N_BATCH = 40
COSTS = LoadCosts(call=2e-3, token=1e-3, pair=1e-7, read=1e-3, byte=1e-6, load=1e-3, put=1e-5)


def chunk(kind, size=10_000, n_tokens=16):
    """Make a chunk; R is in RAM, D on disk, G lost."""
    return Chunk(
        ChunkId(b"", b"", bytes(4 * n_tokens)),
        0 if kind == "G" else size,
        ram=0 if kind == "R" else ABSENT,
        disk=0 if kind == "D" else ABSENT,
    )


def chunks(kinds):
    return [chunk(kind) for kind in kinds]


def simulated(path, start, cut, costs):
    """Return the delay of a cut by simulating its steps."""
    read_at = engine = batch = 0.0
    position = start
    for index, one in enumerate(path):
        is_read = one.disk != ABSENT and index >= cut
        if is_read or one.ram != ABSENT:
            if is_read:
                read_at = (read_at or costs.read) + costs.byte * one.size
                engine = max(engine, read_at)
            engine += costs.put * one.n_tokens
            batch = 0
        else:
            for i in range(one.n_tokens):
                engine += costs.call if (batch + i) % N_BATCH == 0 else 0
                engine += costs.token + costs.pair * (position + i + 0.5)
            batch += one.n_tokens
        position += one.n_tokens
    return costs.load + engine


paths = st.lists(
    st.builds(chunk, st.sampled_from("RDDG"), st.integers(1, 50_000), st.just(16)),
    min_size=1,
    max_size=24,
)
seconds = st.floats(0, 1e-2)
costs = st.builds(
    LoadCosts, seconds, seconds, st.floats(0, 1e-5), seconds, st.floats(0, 1e-5), seconds, seconds
)


@settings(deadline=None)
@given(paths, st.sampled_from([0, 16, 400]), costs)
def test_no_cut_is_better_than_the_best_one(path, start, costs):
    work = LoadWork.of(path, start, N_BATCH)
    found = cut_delays(work, costs)
    expected = [simulated(path, start, cut, costs) for cut in range(len(path) + 1)]
    assert found.min() == pytest.approx(min(expected), rel=1e-6, abs=1e-9)
    assert np.all(found >= np.array(expected) * (1 - 1e-9) - 1e-9)
    chosen = expected[best_cut(work, costs)]
    assert chosen * 0.95 <= min(expected) * (1 + 1e-6) + 1e-9


@settings(deadline=None)
@given(paths, st.sampled_from([0, 16, 400]), costs)
def test_a_plan_covers_the_chunks_up_to_the_last_one_loaded(path, start, costs):
    runs, expected_s = plan_load(path, start, N_BATCH, costs)
    planned = [one for run in runs for one in run.chunks]
    assert planned == path[: len(planned)]
    assert all(one.ram == ABSENT for one in path[len(planned) :])
    assert [run.is_loaded for run in runs] == [True, False][:: 1 if len(runs) % 2 else -1] * (
        len(runs) // 2
    ) + [True] * (len(runs) % 2)
    for run in runs:
        assert not any(one.ram != ABSENT for one in run.chunks if not run.is_loaded)
        assert not any(one.size == 0 for one in run.chunks if run.is_loaded)
    cut = sum(1 for run in runs if not run.is_loaded for one in run.chunks if one.disk != ABSENT)
    on_disk = [i for i, one in enumerate(planned) if one.disk != ABSENT]
    cut = len(planned) if cut == len(on_disk) else on_disk[cut]
    assert expected_s == pytest.approx(simulated(planned, start, cut, costs), rel=1e-6, abs=1e-9)


def shape(runs):
    return "".join(("L" if run.is_loaded else "E") * len(run.chunks) for run in runs)


@pytest.mark.parametrize(
    ("kinds", "costs", "expected"),
    [
        ("DDDDDDDD", COSTS, "EEELLLLL"),  # earliest chunks are recomputed
        ("DDDDDDDD", COSTS._replace(token=1e-2), "LLLLLLLL"),  # recomputing is slow
        ("DDDDDDDD", COSTS._replace(byte=4e-6), "EEEEEELL"),  # reading is slow
        ("RRRRRRRD", COSTS._replace(byte=1e-4), "LLLLLLL"),  # the rest is left to Llama
        ("DDDDDDDD", COSTS._replace(read=1), ""),  # all chunks are left to Llama
        ("RDRDRDRD", COSTS._replace(byte=2e-6), "LELELLLL"),  # chunks in RAM are not recomputed
        ("GDDDDDDD", COSTS, "EEELLLLL"),
        ("DDDGDDDD", COSTS, "EELELLLL"),  # lost chunks are recomputed
    ],
)
def test_plans(kinds, costs, expected):
    assert shape(plan_load(chunks(kinds), 0, N_BATCH, costs).runs) == expected


def test_without_costs_everything_stored_is_loaded():
    runs, expected_s = plan_load(chunks("DGRRGGD"), 0, N_BATCH, None)
    assert shape(runs) == "LELLEEL"
    assert expected_s is None


# -- profiling ------------------------------------------------------------------------------------


def test_line_through_exact_points():
    line = LinearFit(3, decay=0.9)
    for n, p in [(16, 0), (64, 100), (256, 1000), (32, 500)]:
        line.add(2e-3 + 1e-4 * n + 1e-6 * n * p, 1, n, n * p)
    assert line.coefficients() == pytest.approx([2e-3, 1e-4, 1e-6])


def test_one_point_is_a_price_per_token():
    line = LinearFit(3, decay=0.9)
    line.add(0.5, 1, 250, 250 * 125 / 4096)
    assert line.coefficients()[1] == pytest.approx(0.5 / 250, rel=1e-3)


def test_the_time_of_a_unit_has_all_that_comes_with_it():
    line = LinearFit(3, decay=0.9)
    assert line.unit_seconds(1) == 0
    for n, p in [(16, 0), (256, 1000), (64, 100)]:
        line.add(2e-3 + 1e-4 * n + 1e-6 * n * p, 1, n, n * p)
    assert line.unit_seconds(1) == pytest.approx(2e-3 / 256 + 1e-4 + 1e-3)


def test_a_chunk_that_is_lost_costs_its_evaluation():
    profile = CostProfile(None)
    guessed = profile.miss_costs()
    assert guessed.chunk_s == 0
    assert guessed.byte_s > 0
    profile.evaluated(400, 0, 8.0)
    profile.read(1_000_000, 0.5)
    profile.learn()
    assert profile.miss_costs().chunk_s == pytest.approx(16 * 8 / 400)
    assert profile.miss_costs().byte_s == pytest.approx(0.5e-6)


def test_nothing_takes_less_than_nothing():
    line = LinearFit(2, decay=0.9)
    for n, s in [(100, 0.10), (200, 0.30), (300, 0.50)]:  # a line through (50, 0)
        line.add(s, 1, n)
    start, each = line.coefficients()
    assert start == 0
    assert 1e-3 < each < 2e-3


@pytest.mark.parametrize("factor", [500, 10, 0.1, 1 / 500])
def test_a_change_is_followed(factor):
    line = LinearFit(2, decay=0.8)
    for n in [100, 300, 200] * 8:
        line.add(1e-3 * n, 1, n)
    for n in (100, 200):
        line.add(factor * 1e-3 * n, 1, n)
    assert line.coefficients()[1] == pytest.approx(factor * 1e-3, rel=0.2)


def test_a_hiccup_is_none():
    line = LinearFit(2, decay=0.8)
    for n in [100, 300, 200] * 8:
        line.add(1e-3 * n, 1, n)
    line.add(5, 1, 200)
    assert line.coefficients()[1] == pytest.approx(1e-3, rel=0.1)


def test_costs_are_unknown_before_enough_was_seen():
    profile = CostProfile(None)
    assert profile.costs() is profile.load_seconds(16) is None
    profile.evaluated(64, 0, 0.1)
    profile.read(3_000_000, 0.3)
    assert profile.costs() is None
    profile.read(2_000_000, 0.2)
    assert profile.costs().load == profile.costs().put == 0
    profile.loaded(640, 0.01)
    assert profile.load_seconds(640) is None, "fitted where nobody waits for it"
    profile.learn()
    assert profile.load_seconds(640) == pytest.approx(0.01)


def test_another_process_knows_what_this_one_measured():
    profile = CostProfile(None)
    for n in (16, 64, 256):
        profile.evaluated(n, 100, 1e-3 + 1e-4 * n)
        profile.read(50_000 * n, 1e-4 + 1e-6 * n)
        profile.loaded(n, 1e-5 * n)
    assert profile.has_unsaved_points
    stored = profile.to_json()
    assert not profile.has_unsaved_points
    assert CostProfile(stored).costs() == pytest.approx(profile.costs(), rel=1e-3)
    assert not CostProfile(stored).has_unsaved_points


HOSTILE = {
    "no JSON": "{",
    "a list": "[1]",
    "deep": "[" * 100_000,
    "other lines": '{"read": 7, "recompute": {"a": 1}}',
    "too short": '{"read": [[1.0, 1]]}',
    "no numbers": '{"read": [["1", 1, 1], [null, 1, 1], [true, 1, 1]]}',
    "not finite": '{"read": [[NaN, 1, 1], [1, Infinity, 1]]}',
    "negative": '{"read": [[-1, 1, 1], [1, -1, 1]]}',
    "huge": json.dumps({"read": [[1e-300, 1, 1], [1, 10**400, 1]]}),
}


@pytest.mark.parametrize("stored", HOSTILE.values(), ids=HOSTILE)
def test_what_cannot_be_right_is_ignored(stored):
    profile = CostProfile(stored)
    profile.evaluated(64, 0, 0.1)
    assert profile.costs() is None
    profile.read(10_000_000, 1)
    assert profile.costs().byte == pytest.approx(1e-7)
