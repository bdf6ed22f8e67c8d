"""The order, the pieces and the times of calls that are decoded together."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("fastapi")

from llmaas_plugins.server.calls import Stage
from llmaas_plugins.server.rounds import Member, Pieces, Rounds, may_share, next_member

PIECE, TOKEN, READY, AWAY, BACK = (
    Member(stage) for stage in (Stage.PIECE, Stage.TOKEN, Stage.READY, Stage.AWAY, Stage.BACK)
)
SOON = Member(Stage.AWAY, is_expected=True)
OVER = Member(Stage.PIECE, is_over=True)
NARROW = Member(Stage.TOKEN, level=3)


@pytest.mark.parametrize(
    ("members", "stepped", "found"),
    [
        ([], (), None),
        ([PIECE, AWAY], (), None),
        ([TOKEN, PIECE, TOKEN], (), 0),
        ([TOKEN, PIECE, TOKEN], {0}, None),
        ([TOKEN, BACK, READY, READY], (), 2),
        ([TOKEN, BACK, AWAY], (), 1),
        ([AWAY, TOKEN], (), 1),
        ([SOON, TOKEN], (), None),
        ([SOON, TOKEN, BACK], (), 2),
        ([READY, OVER], (), 1),
        ([Member(Stage.AWAY, is_over=True), TOKEN], (), 1),
        ([Member(Stage.TOKEN, is_over=True), TOKEN], {0}, 0),
        ([NARROW, TOKEN], (), 0),
        ([NARROW, TOKEN], {3}, 1),
        ([TOKEN, NARROW], {0}, 1),
        ([TOKEN, NARROW], {0, 3}, None),
        ([SOON, TOKEN, NARROW], (), 2),
    ],
)
def test_who_is_next(members, stepped, found):
    assert next_member(members, set(stepped)) == found


def test_pieces_take_as_long_as_a_batch():
    pieces = Pieces()
    pieces.evaluated(64, 0.001)
    assert pieces.n_tokens == 128
    pieces.evaluated(64, 9.0)  # the rest of a prompt, or another call's
    assert pieces.n_tokens == 128
    pieces.evaluated(128, 0.3)
    assert pieces.n_tokens == 64
    pieces.stepped(1.0)  # weights are read from disk, whatever the number of tokens
    for _ in range(4):
        pieces.evaluated(pieces.n_tokens, 1.0)
    assert pieces.n_tokens == 64
    pieces.stepped(2.0)
    for _ in range(8):
        pieces.evaluated(pieces.n_tokens, 1.0)
    assert pieces.n_tokens == 512
    for _ in range(10):
        pieces.evaluated(pieces.n_tokens, 5.0)
    assert pieces.n_tokens == 8


def test_pieces_are_no_larger_than_batches():
    """A piece of several batches would keep its size, as it is timed batch by batch."""
    pieces = Pieces()
    pieces.fit(32)
    pieces.evaluated(32, 0.001)
    assert pieces.n_tokens == 32
    pieces.evaluated(32, 3.0)
    assert pieces.n_tokens == 16


def test_times_of_rounds():
    rounds = Rounds()
    assert rounds.seconds({0: 2}) == math.inf
    rounds.stepped(0, 1, 0.1)
    assert rounds.seconds({0: 1}) == pytest.approx(0.1)
    assert rounds.seconds({0: 3}) == pytest.approx(0.3)  # at most in proportion
    rounds.stepped(0, 2, 0.12)
    assert rounds.seconds({0: 3}) == pytest.approx(0.18)
    assert rounds.seconds({0: 3, 4: 1}) == math.inf
    rounds.stepped(4, 1, 0.05)
    assert rounds.seconds({0: 3, 4: 1}) == pytest.approx(0.23)
    rounds.sampled(0.01)
    assert rounds.seconds({0: 3, 4: 1}) == pytest.approx(0.27)


def test_times_of_rounds_follow_the_machine():
    rounds = Rounds()
    rounds.stepped(0, 4, 9.0)  # once, when the machine was busy
    rounds.stepped(0, 1, 0.1)
    assert rounds.seconds({0: 4}) == pytest.approx(0.4)
    for _ in range(30):
        rounds.stepped(0, 1, 0.2)
    assert rounds.seconds({0: 1}) == pytest.approx(0.2, rel=0.01)


@pytest.mark.parametrize(
    ("limit_s", "round_s", "spent_s", "n_tokens", "shares"),
    [
        (None, math.inf, 0.0, 0, True),
        (0.1, 0.1, 0.0, 0, True),
        (0.1, 0.11, 0.0, 0, False),
        (0.1, math.inf, 0.0, 0, False),
        (0.1, 0.11, 0.05, 9, False),  # it is ahead, but would not stay so
        (0.1, 0.09, 0.9, 9, True),
        (0.1, 0.09, 0.92, 9, False),  # it is late, and catches up alone
    ],
)
def test_who_may_share(limit_s, round_s, spent_s, n_tokens, shares):
    assert may_share(limit_s, round_s, spent_s, n_tokens) == shares
