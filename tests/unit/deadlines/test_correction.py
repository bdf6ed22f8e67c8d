"""Measured times over predicted ones."""

from __future__ import annotations

import numpy as np
import pytest

from llmaas_plugins.deadlines.correction import Correction, Factor


def corrected(*ratios):
    correction = Correction()
    for ratio in ratios:
        correction.add(ratio, 1.0)
    return correction.factor()


def test_without_requests_times_may_be_a_tenth_longer():
    assert corrected() == Factor(1.0, 1.1)


def test_few_requests_keep_the_margin():
    assert corrected(2.0) == Factor(2.0, pytest.approx(2.2))
    assert corrected(1.0, 1.0, 1.0) == Factor(1.0, 1.03)


def test_single_outliers_do_not_count():
    assert corrected(*[1.0] * 8, 9.0, 9.0) == Factor(1.0, 1.03)


def test_few_of_varying_times_exceed_the_high_factor():
    ratios = np.random.default_rng(0).normal(2.0, 0.2, 2000)
    correction, n_above = Correction(), 0
    for i, ratio in enumerate(ratios):
        n_above += i >= 10 and ratio > correction.factor().high
        correction.add(float(ratio), 1.0)
    assert n_above < 0.08 * len(ratios)
    assert correction.factor().high < 4.0


@pytest.mark.parametrize(("before", "after"), [(1.0, 3.0), (3.0, 0.5)])
def test_a_machine_that_changes_is_followed_in_ten_requests(before, after):
    expected = Factor(after, pytest.approx(1.03 * after))
    assert corrected(*[before] * 20, *[after] * 10) == expected


def test_hostile_ratios_are_bounded():
    correction = Correction()
    for measured, predicted in ((1e9, 1.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1e-300)):
        correction.add(measured, predicted)
    factor = correction.factor()
    assert 1e-3 <= factor.middle <= factor.high < 1e4
