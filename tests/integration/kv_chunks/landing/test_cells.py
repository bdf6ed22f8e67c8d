"""Stored chunks decoded straight into the engine's cells, against a restore through buffers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from landing import (
    PROMPT,
    TIERS,
    assert_alike,
    keep,
    staged,
)
from restoring import (
    cells,
    engine_of,
    leave_ram,
    position_after,
    restore,
)

from llmaas_plugins.kv_chunks.parking.sequences import SCRATCH_SEQUENCE

# -- the same cells --------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", TIERS)
def test_cells_are_those_that_come_through_the_buffers(make_one, stored, ways, tier):
    active = stored()
    with make_one() as one, make_one() as other:
        leave_ram(active, one, PROMPT, TIERS[tier])
        restored, found = restore(active, one, PROMPT)
        assert ways == [("_load_directly", len(PROMPT))]
        assert (restored.n_tokens, restored.n_loaded) == (len(PROMPT), len(PROMPT))
        leave_ram(active, one, PROMPT, TIERS[tier])
        _, expected = staged(active, other)
        assert ways[1:] == [("_load_directly", 0), ("_load_in_segments", len(PROMPT))]
        assert np.array_equal(found, expected)
        assert_alike(active, one, other)


@pytest.mark.usefixtures("small_pieces")
def test_threads_bring_them_all_to_their_places(make, stored, ways):
    active = stored(make)
    with make() as one, make() as other:
        _, expected = staged(active, other)
        for on_disk in TIERS.values():
            ways.clear()
            leave_ram(active, one, PROMPT, on_disk)
            _, found = restore(active, one, PROMPT)
            assert ways == [("_load_directly", len(PROMPT))]
            assert np.array_equal(found, expected)
            engine_of(active, one).drop_resident()


def test_behind_cells_that_stayed(make, stored, ways):
    active = stored(make)
    with make() as one, make() as other:
        _, expected = staged(active, other)
        for n_kept in (5, 40, 64, 180):
            keep(active, one, n_kept)
            ways.clear()
            restored, found = restore(active, one, PROMPT)
            assert ways == [("_load_directly", len(PROMPT) - n_kept // 16 * 16)]
            assert restored.n_tokens == len(PROMPT)
            assert np.array_equal(found, expected)
            assert position_after(one, SCRATCH_SEQUENCE) == 0
            engine_of(active, one).drop_resident()


def test_the_last_chunk_may_only_begin_like_the_prompt(make, stored, ways):
    active = stored(make)
    with make() as one, make() as other:
        assert restore(active, one, PROMPT[:5])[0] is None  # not worth a load
        for n in (16, 17, 173):
            ways.clear()
            restored, found = restore(active, one, PROMPT[:n])
            assert ways == [("_load_directly", n)]
            assert (restored.n_tokens, restored.n_loaded) == (n, n)
            assert position_after(one) == n
            assert np.array_equal(found, staged(active, other, PROMPT[:n])[1])
            for llama in (one, other):
                engine_of(active, llama).drop_resident()


def test_lossless_cells_are_vanillas(make, stored, ways):
    with make() as llama:
        llama.eval(PROMPT)
        expected = cells(llama)
    active = stored(make, codec="lossless", parked_tokens=256)
    with make() as llama:
        restored, found = restore(active, llama, PROMPT)
        assert ways == [("_load_directly", restored.n_tokens)]
        assert np.array_equal(found, expected)


@pytest.mark.usefixtures("small_pieces")
def test_another_life_with_little_ram(stored, suite, make_one, ways):
    """Threads compete for the memory that chunks are read into."""
    stored()
    active = suite(codec="tolerance", ram_budget="1 MiB")
    with make_one() as one, make_one() as other:
        restored, found = restore(active, one, PROMPT)
        assert ways[0][0] == "_load_directly"
        assert ways[0][1] > 0
        assert restored.n_loaded == len(PROMPT)
        assert np.array_equal(found, staged(active, other)[1])


@pytest.mark.usefixtures("small_pieces")
def test_two_engines_at_the_same_time(stored, make_one, ways):
    active = stored()
    with make_one() as one, make_one() as other, make_one() as third:
        prompts = {one: PROMPT, other: PROMPT[:90]}
        expected = {}
        for llama, prompt in prompts.items():
            expected[llama] = staged(active, third, prompt)[1]
            engine_of(active, third).drop_resident()
        ways.clear()
        with ThreadPoolExecutor(2) as pool:
            for _ in range(5):
                leave_ram(active, third, PROMPT)
                found = {
                    llama: pool.submit(restore, active, llama, prompt)
                    for llama, prompt in prompts.items()
                }
                for llama in prompts:
                    assert np.array_equal(found[llama].result()[1], expected[llama])
                    engine_of(active, llama).drop_resident()
        assert sorted(ways) == [("_load_directly", 90)] * 5 + [("_load_directly", len(PROMPT))] * 5
