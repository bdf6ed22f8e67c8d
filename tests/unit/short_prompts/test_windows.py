"""Windows over long texts."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmaas_plugins.short_prompts.encoder.windows import windows_of


@given(n=st.integers(0, 3000), most=st.integers(80, 510), overlap=st.integers(0, 64))
def test_each_piece_counts_once_in_a_window_that_fits(n, most, overlap):
    found = windows_of(n, most, overlap)
    counted = [i for window in found for i in range(window.first, window.last)]
    assert counted == list(range(n))
    for window in found:
        assert 0 <= window.start <= window.first < window.last <= window.end <= n
        assert window.end - window.start <= most
    for one, other in itertools.pairwise(found):
        assert one.end - other.start == overlap


@pytest.mark.parametrize("n", [511, 700, 1500])
def test_a_piece_counts_where_it_is_farther_from_the_edges(n):
    found = windows_of(n, 510)
    for mine in found:
        for piece in range(mine.first, mine.last):
            distances = [
                min(piece - w.start if w.start else n, w.end - 1 - piece if w.end < n else n)
                for w in found
                if w.start <= piece < w.end
            ]
            own = min(
                piece - mine.start if mine.start else n,
                mine.end - 1 - piece if mine.end < n else n,
            )
            assert own >= max(distances) - 1


def test_windows_are_about_equally_long():
    lengths = {window.end - window.start for window in windows_of(600, 510)}
    assert max(lengths) - min(lengths) <= 1
