"""Whether drafts pay, and how likely drafted tokens are kept: learned from made-up times."""

from __future__ import annotations

import numpy as np
import pytest

from llmaas_plugins.elastic.draft_worth import Phase, Trust, Worth

ALONE_S, DRAFT_S = 0.15, 0.02


def measured(worth, fitting=(8,)):
    """Time tokens without drafts until a level drafts; return how many it took."""
    n = 0
    while worth.phase is not Phase.DRAFTING:
        worth.passed(1, {1: ALONE_S})
        n += 1
        assert n < 10_000
    worth.choose(fitting)
    return n


def drafted(worth, n_tokens, n):
    """Make ``n`` drafts that give ``n_tokens`` each, unless drafts end before."""
    for made in range(n):
        if worth.phase is not Phase.DRAFTING:
            return made
        worth.drafted(n_tokens, 3 * DRAFT_S + ALONE_S)
    return n


def test_drafts_that_pay_go_on():
    worth = Worth()
    measured(worth)
    assert worth.gain is None
    assert drafted(worth, 2, 2000) == 2000
    assert worth.gain == pytest.approx(2 * ALONE_S / (ALONE_S + 3 * DRAFT_S))


def test_luck_decides_little():
    rng = np.random.default_rng(0)
    n_ended = 0
    for _ in range(50):
        worth = Worth()
        measured(worth)
        for _ in range(300):
            if worth.phase is Phase.DRAFTING:
                n_right = int(np.argmin([*(rng.random(3) < 0.6), False]))
                worth.drafted(1 + n_right, 3 * DRAFT_S + ALONE_S)
        n_ended += worth.phase is not Phase.DRAFTING
    assert n_ended <= 5


def test_drafts_that_do_not_pay_are_tried_again_ever_more_rarely():
    worth, rests = Worth(), []
    measured(worth)
    for _ in range(8):
        assert drafted(worth, 1, 100) < 100
        assert worth.phase is Phase.RESTING
        rests.append(measured(worth))
    assert rests[0] < 300
    assert rests == sorted(rests)
    assert rests[-1] == pytest.approx(4096, abs=10)


def test_drafts_that_pay_again_are_tried_soon_after_their_next_end():
    worth = Worth()
    measured(worth)
    drafted(worth, 1, 100)
    measured(worth)
    drafted(worth, 4, 100)
    drafted(worth, 1, 1000)
    assert worth.phase is Phase.RESTING
    assert measured(worth) < 300


def test_a_gain_that_is_small_is_measured_again():
    worth = Worth()
    measured(worth)
    assert drafted(worth, 1.6, 10_000) < 3000
    assert worth.phase is Phase.MEASURING


def settled(fitting, gains):
    """Draft with the levels that fit, each at its own speed; return the levels and the worth."""
    worth, tried = Worth(), []
    measured(worth, fitting)
    for _ in range(400):
        if worth.phase is Phase.DRAFTING:
            level = worth.choose(fitting)
            tried += [level] if tried[-1:] != [level] else []
            worth.drafted(2, 2 * ALONE_S / gains[level])
    return tried, worth


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ({6: 1.1, 7: 1.3, 8: 1.2}, [6, 7, 8, 7]),
        ({6: 1.4, 7: 1.3, 8: 1.5}, [6, 7, 6]),  # narrower ones are tried while that helps
        ({6: 0.5, 7: 1.1, 8: 1.2}, [6, 7, 8]),
        ({8: 1.2}, [8]),
    ],
)
def test_the_level_that_says_most_tokens_a_second_drafts(gains, expected):
    tried, worth = settled(tuple(gains), gains)
    assert tried == expected
    assert worth.gain == pytest.approx(max(gains[level] for level in tried))
    assert worth.saved_s == pytest.approx(ALONE_S * (1 - 1 / worth.gain))


def test_few_of_many_levels_are_tried():
    gains = {level: 1 + level / 10 for level in range(1, 9)}
    assert settled(tuple(gains), gains)[0] == [1, 5, 8]


def test_no_level_drafts_if_none_pays():
    tried, worth = settled((6, 7, 8), {6: 0.8, 7: 0.9, 8: 0.95})
    assert tried == [6, 7, 8]
    assert (worth.phase, worth.level) == (Phase.RESTING, None)


def test_other_levels_are_tried_if_the_present_one_no_longer_fits():
    gains = {6: 1.5, 7: 1.3, 8: 1.2}
    _, worth = settled((6, 7, 8), gains)
    assert worth.level == 6
    assert worth.choose((6, 7)) == 6
    assert worth.choose((7, 8)) == 7
    assert worth.gain is None
    worth.choose(())
    assert worth.phase is Phase.RESTING


def test_trust_learns_what_a_probability_is_worth():
    trust = Trust()
    assert trust.chance(0.9) == pytest.approx(0.9)
    for _ in range(200):
        trust.saw([0.9, 0.9, 0.3], 1)  # the second token was wrong, and the third not judged
    assert trust.chance(0.9) == pytest.approx(0.5, abs=0.05)
    assert trust.chance(0.3) == pytest.approx(0.3)
    assert trust.mean == pytest.approx(0.5, abs=0.05)
    assert 0 <= trust.chance(0.0) <= trust.chance(1.0) <= 1
