"""Memory goes where it saves most time, cliffs included."""

from __future__ import annotations

import numpy as np
import pytest

from llmaas_hooks import MemoryClaim
from llmaas_plugins.memory.division import STEP, divide, saved_s, values

RNG = np.random.default_rng(5)


def claim(*points, held=0, most=None, least=0):
    """Return a claim with points in steps and seconds."""
    saved = tuple((n * STEP, float(s)) for n, s in [(0, 0), *points])
    most = saved[-1][0] if most is None else most * STEP
    return MemoryClaim("memory", held * STEP, most, saved, lambda _: None, least)


def steps(n, *claims):
    return [size // STEP for size in divide(n * STEP, claims)]


def test_the_steepest_claim_is_served_first():
    steep, flat = claim((10, 2.0)), claim((30, 3.0))
    assert steps(8, flat, steep) == [0, 8]
    assert steps(25, flat, steep) == [15, 10]
    assert steps(100, flat, steep) == [30, 10]


def test_a_cliff_is_climbed_as_a_whole_or_not_at_all():
    cliff, line = claim((9, 0.0), (10, 5.0)), claim((20, 4.0))
    assert steps(9, cliff, line) == [0, 9]  # all of it would not fit
    assert steps(10, cliff, line) == [10, 0]
    assert steps(14, cliff, line) == [10, 4]


def test_what_saves_nothing_stays_where_it_is():
    idle, line = claim(most=50, held=7), claim((5, 1.0), most=40, held=2)
    assert steps(12, idle, line) == [7, 5]
    assert steps(8, idle, line) == [7, 1]  # nothing is known of it
    assert steps(70, idle, line) == [7, 20]  # and it may still take more


def test_what_is_known_to_save_nothing_goes_to_whom_it_saves_time():
    useless, line = claim((50, 0.0), held=7, least=2 * STEP), claim((20, 1.0), held=2)
    assert steps(9, useless, line) == [2, 7]
    assert steps(25, useless, line) == [5, 20]  # the rest stays where it is
    unknown = claim(most=50, held=7)
    assert steps(9, unknown, line) == [7, 2]


def test_claims_of_which_nothing_is_known_shrink_alike_below_what_others_need():
    small, large = claim(most=50, held=4), claim(most=50, held=8)
    used = claim((9, 0.0), held=5, least=3 * STEP)
    assert steps(15, small, large, used) == [4, 8, 3]
    assert steps(9, small, large, used) == [2, 4, 3]
    assert steps(2, small, large, used) == [0, 0, 2]


def test_nothing_to_divide():
    assert divide(-5, [claim((3, 1.0))]) == [0]
    assert divide(1 << 30, []) == []


def test_no_division_of_random_curves_is_better_by_more_than_a_step():
    """Compare with all divisions of two concave claims and of a claim with a cliff."""
    for _ in range(20):
        gains = np.sort(RNG.random((2, 12)), axis=1)[:, ::-1].cumsum(axis=1)
        claims = [claim(*enumerate(row, 1)) for row in gains]
        found = sum(map(saved_s, claims, divide(14 * STEP, claims)))
        best = max(sum(map(saved_s, claims, (n * STEP, (14 - n) * STEP))) for n in range(2, 13))
        assert found == pytest.approx(best)


def test_values_of_the_last_and_the_next_bytes():
    one = claim((4, 8.0), (6, 8.0), (8, 9.0), held=4)
    worth = values(one)
    each = STEP >> 20
    assert worth.last == pytest.approx(2.0 / each)
    assert worth.next == pytest.approx(0.25 / each)  # the next ones save only together
    assert values(claim(most=4)) == (0.0, 0.0)


def test_what_is_in_use_stays():
    used, line = claim((9, 1e-6), held=7, least=3 * STEP + 1), claim((20, 4.0))
    assert steps(12, used, line) == [4, 8]
    assert steps(2, used, line) == [2, 0]


def test_less_than_a_step_is_no_change():
    idle = MemoryClaim("memory", 7 * STEP + 4096, 50 * STEP, ((0, 0.0),), lambda _: None)
    assert divide(12 * STEP, [idle, claim((5, 1.0))])[0] == idle.held
