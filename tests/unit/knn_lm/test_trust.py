"""Trust in the datastore: an average of two experts, weighted by their predictions so far."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmaas_plugins.knn_lm.mixing.trust import (
    UNJUDGED,
    PromptTrust,
    Trust,
    log_gain,
    trust_before,
)

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
    """Even the worst mixture costs little without fading, and a little more with it."""
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


def judged(n_prompt, look_back, batches, n_past=0, n_rows=None):
    """Return the judged places of a prompt 0, 1, 2, … that is evaluated in these batches."""
    judgment = PromptTrust(np.arange(n_prompt, dtype=np.int32), look_back)
    found = []
    for n in batches:
        taken = judgment.take(n_past, n, n if n_rows is None else n_rows)
        assert all(n_past <= place < n_past + n for place in taken)
        n_past += n
        for place in taken:
            found.append(place)
            judgment.learn(place, log_gain(0.2, 0.1))
    return found, judgment.trust.weight


@pytest.mark.parametrize("batches", [[30], [29, 1], [15, 15], [1] * 30, [7, 20, 2, 1], [30, 1, 1]])
def test_the_same_tokens_are_judged_in_whatever_batches_they_come(batches):
    found, weight = judged(30, 8, batches)
    assert found == list(range(22, 29))
    assert weight == judged(30, 8, [30])[1] > PRIOR


def test_all_but_the_first_are_judged_of_a_short_prompt():
    assert judged(5, 64, [5])[0] == [0, 1, 2, 3]
    assert judged(1, 64, [1]) == ([], PRIOR)
    assert judged(9, 1, [9]) == ([], PRIOR)


def test_cells_before_the_last_tokens_do_not_matter():
    assert judged(30, 8, [8], n_past=22) == judged(30, 8, [30])


@pytest.mark.parametrize(("n_past", "n_rows"), [(25, 5), (20, 5)], ids=["cells", "rows"])
def test_tokens_without_states_are_left_out(n_past, n_rows):
    found, weight = judged(30, 8, [30 - n_past], n_past, n_rows)
    assert found == list(range(25, 29))
    assert weight == judged(30, 5, [30])[1] > PRIOR


def test_remembered_gains_count_in_their_order():
    gains = [0.5, -2.0, 1.0, UNJUDGED, -0.25, 0.75, -1.0]
    whole, some = (PromptTrust(np.arange(30, dtype=np.int32), 8) for _ in range(2))
    for place, gain in zip(whole.missing, gains, strict=True):
        whole.learn(place, gain)
    for place, gain in reversed(list(zip(some.missing, gains, strict=True))):
        if place >= 25:
            some.learn(place, gain)
    assert some.missing == some.take(22, 8, 8) == [22, 23, 24]
    before = some.trust.weight
    for place, gain in zip([22, 23, 24], gains, strict=False):
        some.learn(place, gain)
    assert some.trust.weight == whole.trust.weight != before


def test_other_tokens_than_the_prompt_s_give_the_prior():
    judgment = PromptTrust(np.arange(30, dtype=np.int32), 8)
    for place in judgment.take(0, 28, 28):
        judgment.learn(place, 1.0)
    assert judgment.trust.weight > PRIOR
    assert judgment.take(28, 9, 9) == []
    assert judgment.trust.weight == PRIOR


def test_one_that_is_half_evaluated_has_the_trust_of_that_half():
    assert judged(30, 8, [26])[0] == list(range(22, 26))
