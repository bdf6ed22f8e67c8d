"""Isotonic regression: conditions, least squares, and known values."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from llmaas_plugins.deadlines.isotonic import rising, rising_grid

VALUES = st.floats(-10, 10)
ROW = st.lists(st.tuples(VALUES, st.floats(0.1, 10)), min_size=1, max_size=12)


def test_known_values():
    found = rising(np.array([1.0, 3, 2, 2, 5, 4]), np.ones(6))
    np.testing.assert_allclose(found, [1, 7 / 3, 7 / 3, 7 / 3, 4.5, 4.5])
    weighted = rising(np.array([2.0, 1.0]), np.array([3.0, 1.0]))
    np.testing.assert_allclose(weighted, [1.75, 1.75])
    assert rising(np.empty(0), np.empty(0)).shape == (0,)


@given(ROW, st.randoms(use_true_random=False))
def test_no_other_rising_values_are_nearer(row, chance):
    values, weights = np.array(row).T
    found = rising(values, weights)
    assert (np.diff(found) >= 0).all()
    distance = weights @ (found - values) ** 2
    for _ in range(5):
        other = np.sort(found + [chance.uniform(-1, 1) for _ in found])
        assert distance <= weights @ (other - values) ** 2 + 1e-6


@given(arrays.arrays(np.float64, (4, 5), elements=st.floats(0, 1)))
def test_a_grid_falls_nowhere_and_keeps_its_mean(values):
    found = rising_grid(values)
    assert (np.diff(found, axis=0) >= 0).all()
    assert (np.diff(found, axis=1) >= 0).all()
    np.testing.assert_allclose(found.mean(), values.mean(), atol=2e-3)


@given(arrays.arrays(np.float64, (3, 4, 2), elements=st.floats(0, 1)))
def test_a_grid_of_three_axes_falls_along_none(values):
    found = rising_grid(values)
    for axis in range(3):
        assert (np.diff(found, axis=axis) >= 0).all()
    np.testing.assert_allclose(found.mean(), values.mean(), atol=5e-3)


@given(arrays.arrays(np.float64, 7, elements=VALUES))
def test_one_axis_is_a_row(values):
    np.testing.assert_allclose(rising_grid(values), rising(values, np.ones(7)), atol=1e-9)


def test_a_grid_that_rises_stays():
    values = np.add.outer(np.arange(3.0), np.arange(4.0))
    np.testing.assert_allclose(rising_grid(values), values)
