"""The line from times of the tables to measured ones."""

from __future__ import annotations

import numpy as np
import pytest

from llmaas_plugins.deadlines.correction import Correction, Fit


def fitted(*times):
    correction = Correction()
    for table_s, measured_s in times:
        correction.add(measured_s, table_s)
    return correction.fit()


def test_without_requests_times_may_be_a_tenth_longer():
    assert fitted() == Fit(0.0, 1.0, 1.1)
    assert Fit().most_s(2.0) == pytest.approx(2.2)


def test_equal_requests_say_nothing_about_the_slope():
    fit = fitted(*[(0.01, 0.035)] * 5)
    assert (fit.offset_s, fit.slope) == (pytest.approx(0.025), pytest.approx(1.0))
    assert fit.margin == pytest.approx(1.03)


@pytest.mark.parametrize(("offset", "slope"), [(0.0, 3.0), (0.02, 1.0), (0.01, 2.0), (0.0, 0.3)])
def test_different_requests_tell_offset_and_slope_apart(offset, slope):
    tables = (0.002, 0.004, 0.006, 0.01)
    fit = fitted(*((table, offset + slope * table) for table in tables * 2))
    for table in tables:
        assert fit.expected_s(table) == pytest.approx(offset + slope * table, rel=0.15)


def test_faster_machines_have_no_negative_offset():
    fit = fitted(*[(0.01, 0.004)] * 5)
    assert (fit.offset_s, fit.slope) == (0.0, pytest.approx(0.4))


def test_narrow_levels_may_be_faster_than_the_tables_say():
    tables, measured = (19.6, 16.0, 14.4, 10.2, 5.5), (19.2, 15.6, 14.2, 9.8, 3.3)
    fit = fitted(*zip(tables, measured, strict=True), *zip(tables, measured, strict=True))
    for table, expected in zip(tables, measured, strict=True):
        assert fit.expected_s(table) == pytest.approx(expected, rel=0.1)
    assert fit.expected_s(0.01) > 0


def test_single_slow_requests_hardly_matter():
    fit = fitted(*[(1.0, 1.0)] * 8, (1.0, 10.0), (1.0, 30.0))
    assert fit.expected_s(1.0) == pytest.approx(1.0, rel=0.05)
    assert fit.margin < 1.15
    first = fitted((1.0, 10.0), (0.2, 0.2), (0.2, 0.2))
    assert first.expected_s(1.0) < 1.5


def test_few_of_varying_times_exceed_the_margin():
    ratios = np.random.default_rng(0).normal(2.0, 0.2, 1000)
    correction, n_above = Correction(), 0
    for i, ratio in enumerate(ratios):
        n_above += i >= 10 and ratio > correction.fit().most_s(1.0)
        correction.add(float(ratio), 1.0)
    assert n_above < 0.08 * len(ratios)
    assert correction.fit().most_s(1.0) < 4.0


@pytest.mark.parametrize(("before", "after"), [(1.0, 3.0), (3.0, 0.5)])
def test_a_machine_that_changes_is_followed_in_ten_requests(before, after):
    times = [(0.1, 0.1 * before)] * 20 + [(0.1, 0.1 * after)] * 10
    assert fitted(*times).expected_s(0.1) == pytest.approx(0.1 * after)


def run(truth, limit_s, n=40, busy=range(0)):
    """Choose the wider of two levels that fits, again and again; return their tables' times."""
    correction, chosen = Correction(), []
    for i in range(n):
        fit = correction.fit()
        table = next((t for t in (0.010, 0.002) if fit.most_s(t) <= limit_s), 0.002)
        chosen.append(table)
        correction.add(truth(table) * (10 if i in busy else 1), table)
    return chosen


def test_costs_that_no_level_changes_do_not_hold_requests_at_the_narrowest():
    """A busy time must not make 25 ms of a grammar a factor of the narrow level's 2 ms."""
    chosen = run(lambda table: 0.025 + table, limit_s=0.040, busy=range(8, 14))
    assert chosen[:8] == [0.010] * 8
    assert chosen[-10:] == [0.010] * 10


def test_a_machine_that_stays_slow_is_tried_seldom():
    chosen = run(lambda table: 3 * table, limit_s=0.020)
    assert chosen[5:].count(0.010) <= 8


def test_hostile_times_are_bounded():
    fit = fitted((1.0, 1e300), (1e300, 0.0), (0.0, 1.0), (1e-300, 1e-300))
    for value in (*fit, fit.most_s(1.0)):
        assert np.isfinite(value)
    assert fit.most_s(1.0) > 0


def test_times_in_batches_with_others_do_not_count_beside_better_ones():
    correction = Correction()
    for _ in range(3):
        correction.add(0.3, 0.1, is_alone=False)
    assert correction.fit().expected_s(0.1) == pytest.approx(0.3)
    correction.add(0.2, 0.1)
    assert correction.fit().expected_s(0.1) == pytest.approx(0.2)
    for _ in range(5):
        for _ in range(9):
            correction.add(0.3, 0.1, is_alone=False)
        correction.add(0.2, 0.1)
    assert correction.fit().expected_s(0.1) == pytest.approx(0.2)


def test_a_machine_that_slows_down_under_load_is_followed():
    """From the second request of the day on, no request has the engine to itself."""
    correction = Correction()
    correction.add(0.1, 0.1)
    for measured_s in (0.11, 0.2, 0.4):
        for _ in range(10):
            correction.add(measured_s, 0.1, is_alone=False)
        assert correction.fit().expected_s(0.1) == pytest.approx(measured_s)
    correction.add(0.3, 0.1)
    assert correction.fit() == Fit(pytest.approx(0.2), pytest.approx(1.0))


def test_times_alone_from_before_a_load_are_forgotten():
    correction = Correction()
    for _ in range(10):
        correction.add(0.1, 0.1)
    for _ in range(10):
        correction.add(0.4, 0.1, is_alone=False)
    correction.add(0.3, 0.1)
    assert correction.fit().expected_s(0.1) == pytest.approx(0.3)
