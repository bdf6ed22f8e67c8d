"""Sizes of the pieces of a prompt."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi")

from llmaas_hooks import LevelTimes
from llmaas_plugins.server.prompt_pieces import PromptTimes, piece_of


def times(level, token_s, first_s=0.0):
    return LevelTimes(level, lambda n: first_s + n * token_s, lambda _: 0.01)


LEVELS = (times(1.0, 0.004), times(0.5, 0.002), times(0.2, 0.0005, 0.02))


@pytest.mark.parametrize(
    ("level", "expected"),
    [(None, 24), (1.0, 24), (0.7, 48), (0.5, 48), (0.2, 160), (0.1, 160)],
)
def test_a_piece_takes_100_ms_at_the_level_that_evaluates_it(level, expected):
    assert PromptTimes(LEVELS, level).most_tokens() == expected


@pytest.mark.parametrize(("token_s", "expected"), [(1.0, 8), (1e-6, 512)])
def test_pieces_have_a_least_and_a_largest_size(token_s, expected):
    assert PromptTimes([times(1.0, token_s)]).most_tokens() == expected


def test_weights_on_disk_are_not_read_for_a_few_tokens():
    assert PromptTimes([times(1.0, 0.001, 2.0)]).most_tokens() == 512
    assert PromptTimes([times(1.0, 0.02, 1.0)]).most_tokens() == 32


def test_nothing_is_known_without_measured_times():
    assert PromptTimes().most_tokens() is None


@pytest.mark.parametrize(
    ("n_tokens", "n_most", "expected"),
    [
        (1, 100, 8),
        (100, 100, 100),
        (125, 100, 125),  # no piece of 25 tokens behind one of 100
        (126, 100, 63),
        (300, 128, 100),
        (900, 512, 450),
        (2000, 8, 8),
        (600, 512, 512),
    ],
)
def test_pieces_are_about_equal(n_tokens, n_most, expected):
    assert piece_of(n_tokens, n_most) == expected


@pytest.mark.parametrize("n_tokens", [1, 7, 99, 130, 515, 600, 1199])
@pytest.mark.parametrize("n_most", [8, 24, 160, 512])
def test_the_last_piece_is_never_much_smaller(n_tokens, n_most):
    piece = piece_of(n_tokens, n_most)
    assert piece <= min(1.25 * n_most + 1, 512) or piece == 8
    n_full, rest = divmod(n_tokens, piece)
    assert rest == 0 or n_full == 0 or rest >= piece - n_full - 1 or piece in (8, 512)


@pytest.mark.parametrize(("n_batch", "expected"), [(64, 128), (100, 100), (150, 150), (512, 150)])
def test_a_piece_is_whole_batches_of_the_engine(n_batch, expected):
    assert piece_of(300, 150, n_batch) == expected
