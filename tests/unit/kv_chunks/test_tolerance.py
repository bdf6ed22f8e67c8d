"""Bits by information density (LLMS §3.2, Eqs. 1-3)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmaas_plugins.kv_chunks.compression.tolerance import allocate_bits, densities

DENSITIES = st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=6).map(np.array)


def weight(density):
    """Return a chunk's weight: its attention, plus the chance that it is requested later."""
    return density**2 + 3 * np.median(density) ** 2


def kept(density, bits):
    """Return the information that is kept (Eq. 3)."""
    return float((weight(density) * (1 - 4.0**-bits)).sum())


def test_density_is_the_mean_of_the_scores():
    assert densities([3.0, 1.0], [4.0, 8.0]).tolist() == [0.75, 0.125]


def test_chunks_nobody_looked_at_count_as_typical():
    assert densities([3.0, 0.0, 1.0, 2.0], [4.0, 0.0, 4.0, 4.0]).tolist() == [0.75, 0.5, 0.25, 0.5]
    assert densities([0.0, 0.0], [0.0, 0.0]).tolist() == [1.0, 1.0]


def test_equal_densities_get_equal_bits():
    assert allocate_bits(np.ones(10), (8, 4, 2), 0.5).tolist() == [4] * 10
    assert allocate_bits(np.ones(10), (8, 4, 2), 1.0).tolist() == [8] * 10
    assert allocate_bits(np.ones(10), (8, 4, 2), 0.25).tolist() == [2] * 10


def test_first_chunk_that_gets_most_attention_keeps_most():
    density = np.array([10.0, *[1.0] * 20, *[0.3] * 4])
    bits = allocate_bits(density, (8, 4, 2), 0.5)
    assert bits[0] == 8
    assert set(bits[21:]) == {2, 4}
    assert bits.mean() <= 4


def test_what_got_no_attention_may_be_asked_for_later():
    density = np.array([*[1.0] * 30, *[1e-3] * 30, *[10.0] * 4])
    bits = allocate_bits(density, (8, 6, 5, 4, 3, 2), 0.5)
    assert (bits[:30].min(), bits[30:60].min()) == (4, 3)
    assert bits[60:].min() > bits[:60].max()


def test_lowest_level_is_kept_below_every_mean():
    assert allocate_bits(np.ones(3), (8, 4), 0.1).tolist() == [4, 4, 4]


def test_chunks_never_get_more_than_they_have():
    most = np.array([2, 8, 4, 8])
    bits = allocate_bits(np.array([100.0, 1.0, 1.0, 1.0]), (8, 4, 2), 0.5, most)
    assert bits.mean() <= 4
    assert (bits <= most).all()
    assert bits[0] == 2


def test_what_one_chunk_cannot_use_goes_to_the_others():
    most = np.array([2, 2, 2, 8])
    assert allocate_bits(np.ones(4), (8, 4, 2), 0.5, most).tolist() == [2, 2, 2, 8]


@given(DENSITIES, st.sampled_from([(8, 4, 2), (4, 2, 1), (8, 2)]), st.floats(0.13, 1.0))
def test_nothing_better_can_be_paid(density, levels, ratio):
    bits = allocate_bits(density, levels, ratio)
    paid = max(8 * ratio, min(levels)) * len(density) + 1e-9
    assert bits.sum() <= paid
    best = max(
        kept(density, np.array(choice))
        for choice in itertools.product(levels, repeat=len(density))
        if sum(choice) <= paid
    )
    rising = sorted(levels)
    step = max(4.0**-low - 4.0**-high for low, high in itertools.pairwise(rising))
    assert (
        kept(density, bits) >= best - weight(density).max() * step - 1e-12
    )  # all but the last step


@given(DENSITIES, st.floats(0.25, 1.0))
def test_denser_chunks_have_no_fewer_bits_but_for_what_is_left_over(density, ratio):
    bits = allocate_bits(density, (8, 4, 2), ratio)
    order = np.argsort(-density, kind="stable")
    falls = bits[order]
    n_out_of_order = sum(b > a for a, b in itertools.pairwise(falls))
    assert n_out_of_order <= 1


@pytest.mark.parametrize("n_chunks", [1, 64, 256])
def test_mean_is_used_up(n_chunks):
    density = np.random.default_rng(n_chunks).lognormal(0, 2, n_chunks)
    bits = allocate_bits(density, (8, 4, 2), 0.5)
    assert 4 * n_chunks - 3 <= bits.sum() <= 4 * n_chunks
