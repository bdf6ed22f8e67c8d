"""Trust in the datastore: an average of two experts by what they made of a text so far."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmaas_plugins.knn_lm.trust import Trust, trust_before

PROBABILITIES = st.lists(
    st.tuples(st.floats(2**-20, 1, width=32), st.floats(2**-20, 1, width=32)), max_size=60
)


def test_at_first_it_is_as_likely_as_not():
    assert Trust().weight == 0.5


def test_the_first_token_makes_it_bayes_posterior():
    trust = Trust()
    trust.observe(0.3, 0.1)
    assert trust.weight == pytest.approx(0.3 / (0.3 + 0.1))


@given(PROBABILITIES)
def test_it_is_the_faded_sum_of_what_each_token_says(both):
    trust = Trust()
    for mixed, alone in both:
        trust.observe(mixed, alone)
    n = len(both)
    score = sum(0.97 ** (n - 1 - i) * math.log(m / a) for i, (m, a) in enumerate(both))
    assert trust.weight == pytest.approx(1 / (1 + math.exp(-score)), abs=1e-9)


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
    """However bad the mixture: log 2 if nothing faded, and a little more as it does."""
    rng = np.random.default_rng(0)
    alone = rng.uniform(0.01, 0.9, 2000).astype(np.float32)
    mixed = 0.7 * alone
    weights = trust_before(mixed, alone)
    loss = np.log(alone) - np.log((1 - weights) * alone + weights * mixed)
    assert loss.sum() < math.log(2) + 1.0
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
    assert trust.weight == pytest.approx(0.5, abs=1e-9)
