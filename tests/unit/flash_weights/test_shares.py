"""Shares of the values that each activation leaves out: least loss for a sparsity."""

from __future__ import annotations

import numpy as np
import pytest

from llmaas_plugins.flash_weights.operands import Operand
from llmaas_plugins.flash_weights.shares import (
    GRID,
    SPARSITIES,
    at_sparsity,
    cheapest_shares,
    equal_share,
    is_share,
)

SMALL, LARGE = (Operand(0, family, (), 8) for family in ("attn_qkv", "ffn_down"))
WEIGHTS = {SMALL: 100, LARGE: 300}


def sparsities(shares):
    """Return the share of all weights that is left out at each sparsity."""
    return sum(shares[one] * WEIGHTS[one] for one in WEIGHTS) / sum(WEIGHTS.values())


def test_equal_losses_for_each_weight_give_equal_shares():
    growth = {one: WEIGHTS[one] * GRID**2 for one in WEIGHTS}
    shares = cheapest_shares(growth, WEIGHTS)
    for share in shares.values():
        assert is_share(share)
        np.testing.assert_allclose(share, equal_share(), atol=0.011)


def test_the_cheaper_activation_leaves_out_more():
    growth = {SMALL: 9 * WEIGHTS[SMALL] * GRID**2, LARGE: WEIGHTS[LARGE] * GRID**2}
    shares = cheapest_shares(growth, WEIGHTS)
    at = SPARSITIES.index(0.5)
    # equal slopes: 9 p = q, and 100 p + 300 q = 200
    assert shares[SMALL][at] == pytest.approx(1 / 14, abs=0.011)
    assert shares[LARGE][at] == pytest.approx(9 / 14, abs=0.011)
    np.testing.assert_allclose(sparsities(shares), SPARSITIES, atol=0.01)
    assert shares[LARGE][-1] == shares[SMALL][-1] == np.float32(0.95)


def test_no_shares_lose_less():
    rng = np.random.default_rng(0)
    growth = {one: np.cumsum(np.sort(rng.random(len(GRID)))) for one in WEIGHTS}
    shares = cheapest_shares(growth, WEIGHTS)
    for i, sparsity in enumerate(SPARSITIES):
        loss = sum(np.interp(shares[one][i], GRID, growth[one]) for one in WEIGHTS)
        for a in GRID:
            b = (sparsity * 400 - 100 * a) / 300
            if 0 <= b <= GRID[-1]:
                other = np.interp(a, GRID, growth[SMALL]) + np.interp(b, GRID, growth[LARGE])
                assert loss <= other + 1.01  # a step of the grid


def test_a_step_never_comes_before_an_earlier_one():
    """A step that costs little after one that costs much is only taken with it."""
    bump = np.where(GRID > 0.3, 100.0, 0.0) + GRID
    growth = {SMALL: bump, LARGE: 30 * GRID}
    shares = cheapest_shares(growth, WEIGHTS)
    assert shares[SMALL][SPARSITIES.index(0.5)] == pytest.approx(0.3)
    assert all(map(is_share, shares.values()))


def test_numbers_between_sparsities():
    assert at_sparsity(equal_share(), 0) == 0
    assert at_sparsity(equal_share(), 0.525) == pytest.approx(0.525)
    with pytest.raises(ValueError, match=r"sparsity is 0\.96, expected 0 to 0\.95"):
        at_sparsity(equal_share(), 0.96)


@pytest.mark.parametrize(
    "values",
    [np.zeros(18), np.full(19, np.nan), np.full(19, 0.96), -equal_share(), equal_share()[::-1]],
    ids=["short", "nan", "all", "negative", "falling"],
)
def test_what_is_no_share(values):
    assert not is_share(values.astype(np.float32))
