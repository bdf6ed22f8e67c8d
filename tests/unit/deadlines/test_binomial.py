"""Exact bounds of shares, against published and closed-form values."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmaas_plugins.deadlines.binomial import most_found, upper_bound


@pytest.mark.parametrize(
    ("n_found", "n", "expected"),
    [
        (0, 10, 1 - 0.05 ** (1 / 10)),
        (0, 300, 1 - 0.05 ** (1 / 300)),
        (9, 10, 0.95 ** (1 / 10)),  # all but one: the bound's power of n is 1 - error
        (10, 10, 1.0),
        (0, 0, 1.0),
        (5, 100, 0.10225),  # the upper end of the usual two-sided interval at 90 %
        (1, 20, 0.21611),
        (10, 20, 0.69805),
    ],
)
def test_known_bounds(n_found, n, expected):
    assert upper_bound(n_found, n, 0.05) == pytest.approx(expected, abs=1e-5)


@given(st.integers(1, 400), st.floats(0.01, 0.9), st.floats(1e-4, 0.5))
def test_the_largest_number_is_the_last_whose_bound_is_low_enough(n, share, error):
    most = most_found(n, share, error)
    if most >= 0:
        assert upper_bound(most, n, error) <= share + 1e-9
    if most + 1 < n:
        assert upper_bound(most + 1, n, error) > share - 1e-9


@settings(max_examples=30)
@given(st.integers(2, 40), st.floats(0.02, 0.6))
def test_a_bound_is_too_low_as_rarely_as_it_says(n, share):
    """Sums the exact chances of all numbers of events whose bound is below the true share."""
    wrong = sum(
        math.comb(n, k) * share**k * (1 - share) ** (n - k)
        for k in range(n)
        if upper_bound(k, n, 0.1) < share
    )
    assert wrong <= 0.1 + 1e-9
