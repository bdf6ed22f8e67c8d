"""Certificates of a risk: what they allow, and how often they are wrong."""

from __future__ import annotations

import numpy as np
import pytest
from answered import LEVELS, N_ANSWER, answers

from llmaas_plugins.deadlines.policies import WHOLE, certified


def risk_of(policy, found):
    """Return the share of answers that differ under a policy."""
    prefill = LEVELS.index(policy.prefill)
    ranges = np.searchsorted(policy.edges, found.margins[:, prefill])
    decode = np.array([LEVELS.index(level) for level in policy.decode])[ranges]
    return found.differ(N_ANSWER)[np.arange(len(found)), prefill, decode].mean()


def constant(found):
    return {(one.prefill, one.decode[0]) for one in found if len(set(one.decode)) == 1}


def test_settings_are_certified_from_safe_to_risky_until_one_fails():
    found = certified(answers(seed=1), answers(seed=2), N_ANSWER, 0.1, 0.05)
    assert found[0] == WHOLE
    assert all(policy.risk <= 0.1 for policy in found)
    assert (1.0, 0.8) in constant(found)
    assert (0.8, 0.8) in constant(found)
    assert (0.4, 0.4) not in constant(found)


def test_a_sure_first_token_allows_a_narrower_answer():
    found = certified(answers(seed=1), answers(seed=2), N_ANSWER, 0.1, 0.05)
    mixed = [one for one in found if one.prefill == 1.0 and len(set(one.decode)) > 1]
    assert mixed
    for policy in mixed:
        assert list(policy.decode) == sorted(policy.decode, reverse=True)
        assert policy.decode[policy.range_of(1e9)] == min(policy.decode)
        assert policy.decode[policy.range_of(0.0)] == max(policy.decode)
        assert sum(policy.shares) == pytest.approx(1)


def test_short_answers_are_certified_further():
    def most(n_tokens):
        return len(certified(answers(seed=1), answers(seed=2), n_tokens, 0.1, 0.05))

    assert most(1) > most(N_ANSWER)


def test_few_requests_certify_only_the_whole_model():
    assert certified(answers(seed=1), answers(20, seed=2), N_ANSWER, 0.1, 0.05) == (WHOLE,)


@pytest.mark.slow
def test_certificates_are_wrong_as_rarely_as_they_say():
    """All certificates of a calibration must hold together; 10 of 100 calibrations may fail."""
    truth, fitting = answers(20_000, seed=3), answers(seed=4)
    wrong = 0
    for seed in range(100):
        found = certified(fitting, answers(300, seed=100 + seed), N_ANSWER, 0.1, 0.1)
        wrong += any(risk_of(policy, truth) > 0.1 for policy in found)
    assert wrong <= 10 + 6  # twice the standard deviation
