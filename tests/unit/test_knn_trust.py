"""Trust in the datastore: an average of two experts by what they made of a text so far."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmaas_plugins.knn_lm.trust import Memory, Trust, trust_before

PROBABILITIES = st.lists(
    st.tuples(st.floats(2**-20, 1, width=32), st.floats(2**-20, 1, width=32)), max_size=60
)


PRIOR = 0.25


def test_at_first_it_is_one_in_four():
    assert Trust().weight == pytest.approx(PRIOR)


def test_the_first_token_makes_it_bayes_posterior():
    trust = Trust()
    trust.observe(0.2, 0.1)
    assert trust.weight == pytest.approx(PRIOR * 0.2 / (PRIOR * 0.2 + (1 - PRIOR) * 0.1))


def test_one_token_wins_no_more_than_e_to_one():
    trust = Trust()
    trust.observe(0.9, 0.001)
    assert trust.weight == pytest.approx(PRIOR * math.e / (PRIOR * math.e + 1 - PRIOR))


@given(PROBABILITIES)
def test_it_is_the_faded_sum_of_what_each_token_says(both):
    trust = Trust()
    for mixed, alone in both:
        trust.observe(mixed, alone)
    n = len(both)
    score = sum(0.97 ** (n - 1 - i) * min(math.log(m / a), 1) for i, (m, a) in enumerate(both))
    score += math.log(PRIOR / (1 - PRIOR))
    weight = 1 / (1 + math.exp(-score))
    assert trust.weight == pytest.approx(weight if weight >= 0.01 else 0, abs=1e-9)


def test_less_than_a_hundredth_is_none():
    trust = Trust()
    while trust.weight > 0:
        assert trust.weight >= 0.01
        trust.observe(0.1, 0.2)
    trust.observe(0.2, 0.1)
    assert trust.weight > 0  # it went on counting


@given(PROBABILITIES)
def test_of_a_text_each_token_has_the_trust_of_those_before_it(both):
    mixed, alone = np.array(both, np.float32).reshape(-1, 2).T
    weights = trust_before(mixed, alone)
    trust, expected = Trust(), []
    for m, a in zip(mixed.tolist(), alone.tolist(), strict=True):
        expected.append(trust.weight)
        trust.observe(m, a)
    assert weights == pytest.approx(expected, abs=1e-6)


def test_a_text_that_the_datastore_does_not_know_costs_little():
    """However bad the mixture: little if nothing faded, and a little more as it does."""
    rng = np.random.default_rng(0)
    alone = rng.uniform(0.01, 0.9, 2000).astype(np.float32)
    mixed = 0.7 * alone
    weights = trust_before(mixed, alone)
    loss = np.log(alone) - np.log((1 - weights) * alone + weights * mixed)
    assert loss.sum() < -math.log(1 - PRIOR) + 1.0
    assert weights[-1] < 0.01


@pytest.mark.parametrize(
    ("p_mix", "p_lm", "weight"), [(0.0, 1.0, 0.0), (1e-300, 1.0, 0.0), (1.0, 1e-320, 1.0)]
)
def test_extreme_bets_are_bounded(p_mix, p_lm, weight):
    trust = Trust()
    for _ in range(1000):
        trust.observe(p_mix, p_lm)
    assert trust.weight == pytest.approx(weight, abs=1e-9)
    for _ in range(1000):
        trust.observe(0.5, 0.5)
    assert trust.weight == pytest.approx(PRIOR, abs=1e-9)


def tokens(*values):
    return np.array(values, np.int32)


def test_a_text_that_goes_on_with_another_begins_with_its_trust():
    memory = Memory()
    memory.begin(tokens(1, 2)).trust.observe(0.2, 0.1)
    memory.begin(tokens(7, 8, 9)).trust.observe(0.1, 0.2)
    first, second = memory.begin(tokens(1, 2, 3)), memory.begin(tokens(7, 8, 9, 1))
    odds = PRIOR / (1 - PRIOR)
    assert (first.trust.weight, first.n_known) == (pytest.approx(2 * odds / (2 * odds + 1)), 2)
    assert (second.trust.weight, second.n_known) == (pytest.approx(odds / (odds + 2)), 3)


def test_the_longest_of_several_is_gone_on_with():
    memory = Memory()
    memory.begin(tokens(1))
    memory.begin(tokens(1, 2, 3)).trust.observe(0.2, 0.1)
    found = memory.begin(tokens(1, 2, 3, 4))
    assert found.n_known == 3
    assert memory.begin(tokens(5)).n_known == 0


def test_the_same_text_again_is_known_whole():
    memory = Memory()
    memory.begin(tokens(1, 2)).trust.observe(0.2, 0.1)
    assert memory.begin(tokens(1, 2)).n_known == 2


def test_what_goes_on_does_not_change_what_it_came_from():
    memory = Memory()
    first = memory.begin(tokens(1, 2))
    memory.begin(tokens(1, 2, 3)).trust.observe(0.2, 0.1)
    assert first.trust.weight == pytest.approx(PRIOR)


def test_only_the_latest_are_remembered():
    memory = Memory()
    for i in range(100):
        memory.begin(tokens(i, i)).trust.observe(0.2, 0.1)
    assert memory.begin(tokens(0, 0, 1)).n_known == 0
    assert memory.begin(tokens(99, 99, 1)).n_known == 2
