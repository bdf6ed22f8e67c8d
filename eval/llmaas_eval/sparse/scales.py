"""Random activations whose channels are as unevenly busy as measured ones.

A channel's values are random numbers times the channel's scale. The scales are lognormal:
``exp(sigma z)`` with a normal ``z``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

__all__ = ["DRAWS", "coverage", "fit_sigma"]

_N_DRAWS, _N_STEPS = 200_000, 30
_TOP = 0.3
_MAX_SIGMA = 3.0

_LEVELS = (np.arange(512) + 0.5) / 512
_NORMAL = np.array([NormalDist().inv_cdf(level) for level in _LEVELS])

Floats = NDArray[np.float64]


def _gaussian() -> Floats:
    """Return magnitudes of a matrix's inputs after a norm, or of values that attention mixes."""
    return np.abs(np.random.default_rng(0).standard_normal(_N_DRAWS))


def _gated() -> Floats:
    """Return magnitudes of SwiGLU's products of two random numbers of standard deviation 1."""
    gate, up = np.random.default_rng(0).standard_normal((2, _N_DRAWS))
    return np.abs(gate / (1 + np.exp(-gate)) * up)


DRAWS: Mapping[str, Callable[[], Floats]] = {
    "attn_qkv": _gaussian,
    "attn_output": _gaussian,
    "ffn_up": _gaussian,
    "ffn_down": _gated,
}
"""Functions that draw one channel's magnitudes at scale 1, by family."""


def coverage(probabilities: NDArray[np.floating], share: float = _TOP) -> float:
    """Return the share of all activity in the busiest ``share`` of the channels."""
    sorted_ = np.sort(probabilities)[::-1]
    return float(sorted_[: round(share * len(sorted_))].sum() / sorted_.sum())


def fit_sigma(draws: Floats, sparsity: float, target: float) -> float:
    """Return the sigma at which the busiest channels have ``target`` of all activity.

    Args:
        draws: Magnitudes of a channel of scale 1.
        sparsity: Share of values that one threshold for all channels leaves out.
        target: ``coverage`` of the channels' probabilities to be active.
    """
    sizes = np.quantile(draws, _LEVELS)
    return _bisect(lambda sigma: coverage(_active(sizes, sigma, sparsity)), target, 0, _MAX_SIGMA)


def _active(sizes: Floats, sigma: float, sparsity: float) -> Floats:
    """Return probabilities to be active of channels at quantiles of the scales' distribution."""
    scales = np.exp(sigma * _NORMAL)

    def active(log_threshold: float) -> Floats:
        return 1 - np.interp(np.exp(log_threshold) / scales, sizes, _LEVELS, left=0, right=1)

    # the share that is left out rises with the threshold
    return active(_bisect(lambda t: 1 - float(active(t).mean()), sparsity, -10, 10))


def _bisect(rising: Callable[[float], float], target: float, low: float, high: float) -> float:
    for _ in range(_N_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < target else (low, middle)
    return (low + high) / 2
