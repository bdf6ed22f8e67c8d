"""Channel usage, cache hits and reads, against randomly drawn tokens."""

from __future__ import annotations

import numpy as np
import pytest

from llmaas_plugins.flash_weights.locality import (
    TYPICAL_SPREAD,
    Reads,
    cached_shares,
    expected_reads,
    typical_means,
    use_rates,
)

GAP, LONGEST, PAGE = 12 << 10, 256 << 10, 4096


def read_by_hand(missing, n_bytes, stride, gap):
    """Return the bytes and reads by which the engine would fetch these channels."""
    reads = []
    for at in np.flatnonzero(missing) * stride:
        begin, end = reads[-1] if reads else (0, -1 << 40)
        if at - end <= gap and at + n_bytes - begin <= LONGEST:
            reads[-1] = begin, at + n_bytes
        else:
            reads.append((at // PAGE * PAGE, at + n_bytes))
    return Reads(len(reads), sum(-(-(end - begin) // PAGE) * PAGE for begin, end in reads))


@pytest.mark.parametrize("family", TYPICAL_SPREAD)
def test_channels_are_used_as_often_as_drawn_values_pass_the_threshold(family):
    means = typical_means(family, 512)
    rng = np.random.default_rng(0)
    values = means * np.abs(rng.standard_normal((4000, 512)))
    for sparsity in (0.2, 0.5, 0.8):
        expected = (values > np.quantile(values, sparsity)).mean(axis=0)
        found = use_rates(means, sparsity)
        assert found.mean() == pytest.approx(1 - sparsity, abs=1e-3)
        assert np.abs(found - expected).max() < 0.04


def test_all_are_used_without_sparsity_and_as_often_when_alike():
    assert (use_rates(typical_means("ffn_up", 64), 0) == 1).all()
    assert use_rates(np.full(64, 3.0), 0.5) == pytest.approx(0.5, abs=1e-3)
    assert use_rates(np.array([1.0, 0.0]), 0.6)[1] == pytest.approx(0, abs=1e-6)


def test_a_cache_has_the_share_it_is_given_and_the_busiest():
    rates = use_rates(typical_means("attn_output", 512), 0.5)
    hits = []
    for share in (0, 0.2, 0.5, 0.9, 1):
        cached = cached_shares(rates, share)
        assert cached.mean() == pytest.approx(share, abs=1e-3)
        assert (np.diff(cached) <= 1e-9).all()
        hits.append(rates @ cached / rates.sum())
    assert hits == sorted(hits)
    assert hits[0] == 0
    assert hits[-1] == pytest.approx(1)
    assert hits[2] > 0.6


def test_hit_rates_are_those_that_were_measured():
    """The tokens are a small model's at half sparsity, with a cache of 30 %."""
    measured = {"attn_qkv": 0.371, "ffn_up": 0.350, "ffn_down": 0.370}
    for family, expected in measured.items():
        rates = use_rates(typical_means(family, 1024), 0.5)
        found = rates @ cached_shares(rates, 0.3) / rates.sum()
        assert found == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("n_bytes", [1024, 1536, 4096, 8192, 40960])
@pytest.mark.parametrize("n_layers", [1, 3])
@pytest.mark.parametrize(("share", "gap"), [(0.02, GAP), (0.3, 0), (0.3, GAP), (0.8, GAP)])
def test_reads_are_those_of_drawn_tokens(n_bytes, n_layers, share, gap):
    stride = n_bytes * n_layers
    missing = share * np.linspace(1.2, 0.8, 2048)
    rng = np.random.default_rng(0)
    drawn = [read_by_hand(rng.random(2048) < missing, n_bytes, stride, gap) for _ in range(60)]
    found = expected_reads(missing, n_bytes, stride, gap)
    assert found.n_reads == pytest.approx(np.mean([one.n_reads for one in drawn]), rel=0.12)
    assert found.n_bytes == pytest.approx(np.mean([one.n_bytes for one in drawn]), rel=0.06)


def test_all_and_none():
    everything = expected_reads(np.ones(256), 4096, 4096, GAP)
    assert everything.n_bytes == pytest.approx(256 * 4096)
    assert everything.n_reads == pytest.approx(4, rel=0.15)
    assert expected_reads(np.zeros(256), 4096, 4096, GAP) == (0, 0)
    assert Reads(1, 2) + Reads(3, 4) == Reads(4, 6)
