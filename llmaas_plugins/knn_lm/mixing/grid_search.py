"""Fitting of alpha, beta, theta and far by maximum likelihood on held-out text."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from llmaas_plugins.knn_lm.mixing.mixture import Mixture, neighbor_share

__all__ = ["FitResult", "HeldOut", "fit_mixture", "search_threshold"]

Floats = npt.NDArray[np.float32]

_ALPHAS = tuple(round(0.05 * i, 2) for i in range(20))
"""Candidates for alpha; 0 suits past chats that never recur."""
_BETAS = (0.0, 0.25, 0.5, 0.75, 1.0)
_THETAS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
"""Candidates for theta, in medians of the nearest neighbors' squared distances."""
_FARS = (math.inf, 6.0, 4.5, 3.0, 1.5, 0.0)
"""Candidates for far, in thetas above the nearest neighbors' median distance."""
_FINER = (0.7, 1.0, 1.4)
_THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99)
_LEAST_GAIN = 5e-4
"""Log-likelihood per target that may be given up to save searches."""


@dataclass(frozen=True, slots=True, eq=False)
class HeldOut:
    """Held-out targets, which made no pair of the datastore, and their neighbors.

    Attributes:
        distances: Squared distances, shape (n, k); infinite if there are fewer than k neighbors.
        hits: Whether each neighbor has the target as value, shape (n, k).
        weights: Weights of the neighbors, shape (n, k).
        p_lm: The model's probability of each target, shape (n,).
        p_max: The model's largest probability at each target, shape (n,).
    """

    distances: Floats
    hits: npt.NDArray[np.bool_]
    weights: Floats
    p_lm: Floats
    p_max: Floats


class FitResult(NamedTuple):
    """Result of a fit.

    Attributes:
        mixture: The best mixture.
        perplexity: Perplexity of the held-out targets with the mixture.
        perplexity_alone: Perplexity of the held-out targets with the model alone.
    """

    mixture: Mixture
    perplexity: float
    perplexity_alone: float


def fit_mixture(held_out: HeldOut, *, has_far: bool = True) -> FitResult:
    """Find the mixture that makes the targets most likely, by a coarse grid and then a finer one.

    Args:
        held_out: Targets to fit on.
        has_far: Whether ``far`` may be finite; False gives the paper's Eq 33.

    Raises:
        ValueError: There are no targets.
    """
    if not len(held_out.p_lm):
        raise ValueError("nothing to fit on: no held-out targets")
    scale = _typical(held_out.distances[:, 0])
    fars = _FARS if has_far else _FARS[:1]
    coarse = [(theta * scale, scale + far * theta * scale) for theta in _THETAS for far in fars]
    _, best = max((_best(held_out, *point) for point in coarse), key=lambda found: found[0])
    finer = [
        (best.theta * step, scale + (best.far - scale) * other)
        for step, other in itertools.product(_FINER, _FINER if best.far < math.inf else (1.0,))
    ]
    gain, best = max((_best(held_out, *point) for point in finer), key=lambda found: found[0])
    alone = float(np.log(held_out.p_lm).mean())
    return FitResult(best, math.exp(-gain), math.exp(-alone))


def search_threshold(held_out: HeldOut, mixture: Mixture) -> tuple[float, float]:
    """Find the smallest probability above which searching gains almost nothing.

    Returns:
        The threshold, or 1.0 if none qualifies, and the share of targets whose search it saves.
    """
    if not len(held_out.p_lm):
        return 1.0, 0.0
    parts = (held_out.distances, held_out.hits, held_out.weights, held_out.p_lm, held_out.p_max)
    gains = np.log(mixture.probability(*parts) / held_out.p_lm)
    for threshold in _THRESHOLDS:
        is_sure = held_out.p_max >= threshold
        if gains[is_sure].sum() <= _LEAST_GAIN * len(gains):
            return threshold, float(is_sure.mean())
    return 1.0, 0.0


def _typical(distances: Floats) -> float:
    """Return the median distance, ignoring zeros, which come from repeated beginnings of texts."""
    others = distances[(distances > 0) & np.isfinite(distances)]
    return float(np.median(others)) if len(others) else 1.0


def _best(held_out: HeldOut, theta: float, far: float) -> tuple[float, Mixture]:
    """Return the best mean log p(y) and the mixture, given theta and far."""
    hit, total = neighbor_share(held_out.distances, held_out.hits, held_out.weights, theta, far)
    change = hit - total * held_out.p_lm
    found = []
    for beta in _BETAS:
        slope = (1 - np.float32(beta) * held_out.p_max) * change
        gains = [
            float(np.log(held_out.p_lm + np.float32(alpha) * slope).mean()) for alpha in _ALPHAS
        ]
        i = int(np.argmax(gains))
        found.append((gains[i], Mixture(_ALPHAS[i], beta, theta, far)))
    return max(found, key=lambda pair: pair[0])
