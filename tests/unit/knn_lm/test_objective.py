"""The value of subsets: sums over members of one value, and f(S) of Eqs. 3 and 4."""

from __future__ import annotations

import math

import numpy as np
import pytest
from subsets import Full, random_full, worth

from llmaas_plugins.knn_lm.datastore.distances import squared_distances
from llmaas_plugins.knn_lm.selection.objective import Members, Objective

THETA = 2.5


def literal_sums(full, members, theta=THETA):
    """Return for each pair the sum of exp(-d) over the members that have its value."""
    keys = full.pairs.astype(np.float64)
    return [
        sum(
            math.exp(-((keys[i] - keys[j]) ** 2).sum() / theta)
            for j in members
            if full.values[i] == full.values[j]
        )
        for i in range(len(full))
    ]


def members_of(full, *parts, theta=THETA):
    members = Members(theta, full.n_dims)
    for part in parts:
        members.add(full.pairs[part], full.values[part])
    return members


@pytest.mark.parametrize("n_values", [1, 3, 50])
def test_sums_are_those_over_the_members_of_the_same_value(n_values):
    full = random_full(1, 60, n_values=n_values)
    chosen = np.arange(0, 60, 3)
    found = members_of(full, chosen).sums(full.pairs, full.values)
    assert np.allclose(found, literal_sums(full, chosen), rtol=1e-5, atol=1e-6)


def test_sums_do_not_depend_on_the_order_in_which_members_came():
    full, rng = random_full(2, 60), np.random.default_rng(2)
    for _ in range(10):
        chosen = rng.permutation(60)[:40]
        parts = np.array_split(chosen, rng.integers(1, 6))
        members = members_of(full, *parts)
        assert len(members) == 40
        found = members.sums(full.pairs, full.values)
        assert np.allclose(found, literal_sums(full, chosen), rtol=1e-5, atol=1e-6)


def test_without_members_of_its_value_the_sum_of_a_pair_is_0():
    full = Full(np.zeros((3, 2)), [7, 7, 8], [0.1] * 3)
    assert members_of(full).sums(full.pairs, full.values).tolist() == [0, 0, 0]
    assert members_of(full, [2]).sums(full.pairs, full.values).tolist() == [0, 0, 1]
    nothing = full.pairs[:0], full.values[:0]
    assert members_of(full, [2]).sums(*nothing).shape == (0,)


def test_sums_are_right_where_they_are_computed_block_by_block():
    full = random_full(3, 5000, n_values=1)
    found = members_of(full, np.arange(10)).sums(full.pairs, full.values)
    picks = [0, 2047, 2048, 4095, 4096, 4999]
    few = Full(full.pairs[[*range(10), *picks]], [0] * 16, [0.1] * 16)
    assert np.allclose(found[picks], literal_sums(few, range(10))[10:], rtol=1e-5)


def test_memory_of_members_is_that_of_their_keys_and_values():
    full = random_full(4, 20, n_dims=5)
    assert members_of(full, [1, 2], [3]).n_bytes == 3 * (5 * 4 + 4)


def test_distances_are_squared_and_never_below_0():
    left = np.array([[0, 0], [3, 4]], np.float32)
    assert squared_distances(left, left).tolist() == [[0, 25], [25, 0]]
    far_off = np.random.default_rng(5).standard_normal((50, 8)).astype(np.float32) + 1000
    assert squared_distances(far_off, far_off).min() >= 0


@pytest.mark.parametrize("alpha", [0.1, 0.9])
def test_value_of_a_subset_is_that_of_the_paper(alpha):
    objective = Objective(THETA, alpha, c=0.7)
    for seed in range(5):
        full = random_full(seed, 30)
        subset = np.random.default_rng(seed).choice(30, 9, replace=False)
        found = objective.value(full.pairs, full.values, full.p_lm, subset)
        assert found == pytest.approx(worth(full, objective, subset)[0], rel=1e-4)


def test_nothing_is_worth_nothing():
    full = random_full(6, 10)
    none = np.empty(0, np.int64)
    assert Objective(THETA).value(full.pairs, full.values, full.p_lm, none) == 0


def test_probability_is_that_of_eq_4():
    found = Objective(1.0, alpha=0.25, c=2.0).probability(
        np.array([0.4], np.float32), np.array([0.5], np.float32)
    )
    assert found[0] == pytest.approx(0.75 * 0.4 + 0.25 * 2.0 * 0.5)


def test_bound_is_what_a_pair_gains_for_itself_and_falls_as_its_probability_grows():
    objective = Objective(THETA, alpha=0.3, c=0.8)
    p_lm = np.array([0.01, 0.2, 0.9], np.float32)
    sums = np.array([0.0, 0.5, 0.0], np.float32)
    before = objective.probability(p_lm, sums)
    after = objective.probability(p_lm, sums + 1)  # the pair itself, at distance 0
    assert np.allclose(objective.bound(p_lm, sums), np.log(after / before), rtol=1e-5)
    assert (np.diff(objective.bound(p_lm, np.zeros(3, np.float32))) < 0).all()


def test_target_that_the_model_takes_for_impossible_is_worth_much_but_not_everything():
    full = Full([[0.0], [5.0]], [1, 2], [0.0, 0.5])
    found = Objective(THETA).value(full.pairs, full.values, full.p_lm, np.array([0, 1]))
    assert 80 < found < 100
    assert np.isfinite(Objective(THETA).bound(full.p_lm, np.zeros(2, np.float32))).all()
