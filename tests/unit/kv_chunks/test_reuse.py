"""RAM is worth the time of the chunks that are used again within its size."""

from __future__ import annotations

import math

import numpy as np
import pytest

from llmaas_plugins.kv_chunks.store.chunk_ids import chain
from llmaas_plugins.kv_chunks.store.reuse import ReuseCurve
from llmaas_plugins.kv_chunks.store.tree import Chunk
from llmaas_plugins.memory.recent import TIME_S

MIB = 1 << 20
N = 4


def chunks(i, n_bytes=2 * MIB):
    """Return a context of four chunks, 8 MiB together."""
    tokens = np.arange(1000 * i, 1000 * i + 16 * N, dtype=np.int32)
    return [Chunk(one, n_bytes) for one in chain(b"r" * 32, tokens)]


def keys(context):
    return [chunk.id.key for chunk in context]


def use(curve, context):
    curve.used(keys(context), [chunk.size for chunk in context])


def seconds(curve, size, most=100 * MIB):
    """Return the seconds that RAM of a size would have saved."""
    sizes, saved = np.array(curve.points(most)).T
    return TIME_S * float(np.interp(size, sizes, saved))


class Clock:
    now = 1.0


@pytest.fixture
def clock(monkeypatch):
    """Let time pass only where a test says so, and expect no new chunks."""
    monkeypatch.setattr("llmaas_plugins.kv_chunks.store.reuse._AHEAD_S", 0.0)
    monkeypatch.setattr("llmaas_plugins.memory.recent.time.monotonic", lambda: Clock.now)
    monkeypatch.setattr(Clock, "now", 1.0)
    return Clock


@pytest.fixture
def still(clock, monkeypatch):
    """Let no time pass, and expect no use of chunks that were not needed yet."""
    monkeypatch.setattr("llmaas_plugins.kv_chunks.store.reuse._SOON_S", math.inf)


def test_contexts_in_turn_are_worth_it_only_together(still):
    contexts = [chunks(i) for i in range(3)]
    curve = ReuseCurve()
    for context in contexts:
        use(curve, context)
    for context in contexts:
        curve.wanted(keys(context), 1e-9, 0.0)
        use(curve, context)
    total = 3 * 8 * MIB * 1e-9
    assert seconds(curve, 16 * MIB) == 0
    assert seconds(curve, 26 * MIB) == pytest.approx(total)
    assert curve.points(8 * MIB) == ((0, 0.0), (8 * MIB, 0.0))  # so little is known to save nothing


def test_nothing_is_known_until_a_chunk_is_used(still):
    curve, context = ReuseCurve(), chunks(1)
    curve.wanted(keys(context), 1e-9, 0.0)
    assert curve.points(4 * MIB) == ((0, 0.0),)
    use(curve, context)
    assert curve.points(4 * MIB) == ((0, 0.0), (4 * MIB, 0.0))
    curve.wanted(keys(context), 1e-9, 0.0)
    assert curve.points(4 * MIB)[-1][1] > 0


def test_nothing_is_known_as_long_as_a_chunk_costs_nothing(still):
    curve, context = ReuseCurve(), chunks(1)
    curve.wanted(keys(context), 0.0, 0.0)
    use(curve, context)
    assert curve.points(4 * MIB) == ((0, 0.0),)


def test_the_context_that_runs_saves_its_own_bytes(still):
    curve, context = ReuseCurve(), chunks(1)
    use(curve, context)
    curve.wanted(keys(context)[1:], 0.0, 0.5)  # the first chunk was in the cells
    assert seconds(curve, 10 * MIB) == pytest.approx(3 * 0.5)
    assert seconds(curve, 3 * MIB) < 3 * 0.5


def test_chunks_that_were_never_used_count_for_nothing(still):
    curve = ReuseCurve()
    curve.wanted(keys(chunks(1)), 1.0, 1.0)
    assert curve.points(1 << 40) == ((0, 0.0),)


def test_the_number_of_chunks_and_distances_is_limited(still, monkeypatch):
    monkeypatch.setattr("llmaas_plugins.kv_chunks.store.reuse._MOST_CHUNKS", 6)
    curve = ReuseCurve()
    for i in range(3):
        use(curve, chunks(i))
    assert len(curve._uses) == 6
    curve.wanted(keys(chunks(0)), 1.0, 0.0)
    assert curve.points(1 << 40) == ((0, 0.0), (8 << 30, 0.0))
    huge = chunks(7, n_bytes=5 << 30)
    use(curve, huge)
    curve.wanted(keys(huge), 1.0, 0.0)
    assert curve.points(1 << 40) == curve.points(8 << 30)


def test_chunks_without_room_show_what_room_would_save(still):
    curve, first, second = ReuseCurve(), chunks(1), chunks(2)
    use(curve, first)
    curve.used(keys(second), [None] * N)
    curve.wanted(keys(second), 0.0, 0.5)
    assert seconds(curve, 10 * MIB) == pytest.approx(N * 0.5)


def test_chunks_that_were_not_needed_yet_are_expected_in_the_time_they_were_left_alone(clock):
    """The context that was left last is worth more, and both lose worth."""
    curve, old, new = ReuseCurve(), chunks(1), chunks(2)
    curve.wanted([], 0.0, 0.5)  # a chunk costs this if it is not in RAM
    clock.now += 100 * TIME_S
    use(curve, old)
    clock.now += 30
    use(curve, new)
    assert seconds(curve, 8 * MIB) / TIME_S == pytest.approx(N * 0.5 / 10, rel=0.25)  # in steps
    both = N * 0.5 * (1 / 10 + 1 / 40)
    assert seconds(curve, 20 * MIB) / TIME_S == pytest.approx(both)
    clock.now += 1000
    assert seconds(curve, 20 * MIB) / TIME_S < both / 50


def test_at_first_as_little_is_expected_as_sums_of_a_short_time_have(clock):
    curve = ReuseCurve()
    curve.wanted([], 0.0, 0.5)
    clock.now += 0.1 * TIME_S
    use(curve, chunks(1))
    assert seconds(curve, 20 * MIB) / TIME_S == pytest.approx(0.0952 * N * 0.5 / 10, rel=0.01)


def test_new_chunks_need_room_that_old_ones_do_not_count_on(clock, monkeypatch):
    monkeypatch.setattr("llmaas_plugins.kv_chunks.store.reuse._AHEAD_S", 10.0)
    curve, old, new = ReuseCurve(), chunks(1), chunks(2)
    curve.wanted([], 0.0, 0.5)
    clock.now += 100 * TIME_S
    use(curve, old)
    clock.now += 9
    use(curve, new)
    assert seconds(curve, 16 * MIB) == 0  # the last seconds brought two contexts
    clock.now += 2  # now one of them
    assert seconds(curve, 8 * MIB) == 0
    assert seconds(curve, 26 * MIB) == seconds(curve, 100 * MIB) > 0
    curve.wanted(keys(new), 0.0, 0.5)  # it is not new any more
    assert seconds(curve, 8 * MIB) > 0


def test_once_needed_only_distances_count(clock):
    curve, one, other = ReuseCurve(), chunks(1), chunks(2)
    clock.now += 100 * TIME_S
    use(curve, one)
    use(curve, other)
    curve.wanted(keys(one), 0.0, 0.5)
    use(curve, one)
    expected = N * 0.5 / 10  # of the other one
    assert seconds(curve, 20 * MIB) == pytest.approx(N * 0.5 + TIME_S * expected)
    use(curve, one)  # it stays in the cells
    clock.now += 6000
    assert seconds(curve, 8 * MIB) < 1e-9


def test_requests_of_which_no_chunk_is_left_are_forgotten(clock):
    curve = ReuseCurve()
    for i in range(5):
        use(curve, chunks(i % 2))
    curve.used([], [])
    assert len(curve._requests) == 2
