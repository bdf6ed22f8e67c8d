"""The paper's theorems on sets so small that every subset can be tried."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from soak import scale
from subsets import Full, best_worth, random_full, worth

from llmaas_plugins.knn_lm.selection.algorithms import offline, online
from llmaas_plugins.knn_lm.selection.objective import Members, Objective

ENOUGH = 1 - 1 / math.e
SLACK = 1e-4
"""Tolerance for single precision."""


@st.composite
def fulls(draw, most=9):
    """Draw a few pairs; keys and values often repeat."""
    n = draw(st.integers(1, most))
    places = st.lists(st.integers(-3, 3), min_size=2, max_size=2)
    keys = draw(st.lists(places, min_size=n, max_size=n))
    values = draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    p_lm = draw(st.lists(st.floats(1e-6, 1), min_size=n, max_size=n))
    return Full(keys, values, p_lm)


objectives = st.builds(
    Objective, st.floats(0.05, 50), alpha=st.floats(0.01, 0.99), c=st.floats(0.01, 2)
)


def value(full, objective, subset):
    rows = np.array(sorted(subset), np.int64)
    return objective.value(full.pairs, full.values, full.p_lm, rows)


@pytest.mark.slow
@settings(max_examples=scale(150, 5000), deadline=None)
@given(fulls(), objectives, st.data())
def test_worth_is_submodular_and_grows_from_nothing(full, objective, data):
    small = data.draw(st.sets(st.integers(0, len(full) - 1)))
    large = small | data.draw(st.sets(st.integers(0, len(full) - 1)))
    one_more = data.draw(st.integers(0, len(full) - 1))
    of_small, of_large = value(full, objective, small), value(full, objective, large)
    assert of_small == pytest.approx(worth(full, objective, small)[0], rel=SLACK, abs=SLACK)
    assert -SLACK <= of_small <= of_large + SLACK
    if one_more not in large:
        gain_of_small = value(full, objective, small | {one_more}) - of_small
        gain_of_large = value(full, objective, large | {one_more}) - of_large
        assert gain_of_small >= gain_of_large - SLACK


@settings(max_examples=scale(150, 5000), deadline=None)
@given(fulls(), objectives, st.data())
def test_no_pair_adds_less_than_its_bound(full, objective, data):
    subset = sorted(data.draw(st.sets(st.integers(0, len(full) - 1))))
    bounds = bounds_of(full, objective, subset)
    without, *more = worth(full, objective, subset, *([*subset, i] for i in range(len(full))))
    for i in set(range(len(full))) - set(subset):
        assert bounds[i] <= more[i] - without + SLACK


@settings(max_examples=scale(60, 2000), deadline=None)
@given(fulls(), objectives, st.data())
def test_greedy_by_exact_gain_reaches_its_share_of_the_best(full, objective, data):
    size = data.draw(st.integers(1, len(full)))
    chosen = greedy(size, lambda subset: worth(full, objective, *extended(full, subset)))
    assert value(full, objective, chosen) >= ENOUGH * best_worth(full, objective, size) - SLACK


@settings(max_examples=scale(100, 3000), deadline=None)
@given(st.integers(0, 10**6), objectives, st.data())
def test_algorithm_1_that_sees_all_and_takes_one_at_a_time_is_greedy_by_the_bound(
    seed, objective, data
):
    full = random_full(seed, 9, n_values=2)
    size = data.draw(st.integers(1, 8))
    wanted = greedy(size, lambda subset: bounds_of(full, objective, subset))
    found = offline(full, size, objective, how="top", rounds=size, candidates=len(full))
    assert found.indices.tolist() == wanted
    assert (found.weights == 1).all()


@pytest.mark.parametrize(("b", "n_candidates"), [(1, 3), (1, 12), (2, 6), (4, 12)])
@pytest.mark.parametrize("spread", [0.7, 10.0], ids=["clouds", "far apart"])
def test_algorithm_1_reaches_the_share_of_theorem_2(b, n_candidates, spread):
    n, size, objective = 12, 4, Objective(theta=1.0)
    full = random_full(b, n, n_values=40, spread=spread)
    found = [
        offline(full, size, objective, how="top", rounds=size // b,
                candidates=n_candidates // b, seed=seed).indices
        for seed in range(scale(100, 2000))
    ]  # fmt: skip
    gamma = max(lost_in_batches(full, objective, indices, b) for indices in found)
    epsilon = math.exp(-n_candidates * size / (n * b))
    share = ENOUGH - gamma - epsilon
    assert share > 0.2  # otherwise the theorem claims almost nothing
    mean = worth(full, objective, *found).mean()
    assert mean >= share * best_worth(full, objective, size)


@pytest.mark.parametrize("size", [4, 6, 8])
@pytest.mark.parametrize("spread", [0.7, 10.0], ids=["clouds", "far apart"])
def test_algorithm_2_reaches_the_share_of_eq_10(size, spread):
    """On average over the orders of arriving pairs, the share of Eq. 10 is reached; a is 2."""
    objective, reached = Objective(theta=1.0), []
    full = random_full(size, 16, n_values=6, spread=spread)
    rng = np.random.default_rng(size)
    for _ in range(scale(40, 400)):
        order = rng.permutation(16)
        stream = Full(full.pairs[order], full.values[order], full.p_lm[order])
        kept = online(stream, size, objective, how="top", buffer=4, shares=(0.25, 0.5, 1.0))
        assert size / 2 <= len(kept) <= size
        reached.append(worth(full, objective, order[kept.indices])[0])
    assert np.mean(reached) >= best_worth(full, objective, size) / 2


def bounds_of(full, objective, subset):
    members = Members(objective.theta, full.n_dims)
    members.add(full.pairs[subset], full.values[subset])
    return objective.bound(full.p_lm, members.sums(full.pairs, full.values))


def extended(full, subset):
    return [[*subset, i] for i in range(len(full))]


def greedy(size, scores_of):
    chosen = []
    for _ in range(size):
        scores = np.array(scores_of(chosen))
        scores[chosen] = -np.inf
        chosen.append(int(np.argmax(scores)))
    return chosen


def lost_in_batches(full, objective, indices, b):
    """Return the largest share of its pairs' gains that a batch falls short of (Assumption 1)."""
    lost = 0.0
    for start in range(0, len(indices), b):
        before, batch = indices[:start], indices[start : start + b]
        without, *alone = worth(full, objective, before, *([*before, i] for i in batch))
        whole = worth(full, objective, indices[: start + b])[0]
        lost = max(lost, 1 - (whole - without) / (np.array(alone) - without).sum())
    return lost
