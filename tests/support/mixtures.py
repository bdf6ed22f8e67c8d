"""The next token's distribution, computed literally by the paper's Eqs. 1, 2, 32 and 33."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from llmaas_plugins.knn_lm.mixing.grid_search import HeldOut


def literal(p_lm, values, distances, weights, mixture):
    """Return p(v) of every token v.

    Args:
        p_lm: The model's distribution.
        values: Tokens of the neighbors.
        distances: Squared distances of the neighbors.
        weights: Weights of the neighbors.
        mixture: A ``Mixture``.
    """
    smallest = min(*distances, mixture.far)
    votes = [
        float(weight) * math.exp(-(float(distance) - smallest) / mixture.theta)
        for weight, distance in zip(weights, distances, strict=True)
    ]
    model = math.exp(-(mixture.far - smallest) / mixture.theta)
    p_knn = [0.0] * len(p_lm)
    for value, vote in zip(values, votes, strict=True):
        p_knn[value] += vote / sum(votes)
    weight = mixture.alpha * (1 - mixture.beta * max(p_lm)) * sum(votes) / (sum(votes) + model)
    return np.array([(1 - weight) * a + weight * b for a, b in zip(p_lm, p_knn, strict=True)])


@dataclass(frozen=True)
class Scene:
    """Distribution and neighbors at one position."""

    p_lm: np.ndarray
    values: np.ndarray
    distances: np.ndarray
    weights: np.ndarray


def scene(seed, n_vocab=30, k=12, size=10.0, n_said=None):
    """Return a random position whose neighbors name at most ``n_said`` different tokens."""
    rng = np.random.default_rng(seed)
    return Scene(
        rng.dirichlet(np.full(n_vocab, 0.3)).astype(np.float32),
        rng.integers(0, n_said or n_vocab, k).astype(np.int32),
        np.sort(rng.gamma(3, size / 3, k) * rng.choice([0.3, 1, 3])).astype(np.float32),
        rng.choice([1, 1, 2.5, 7], k).astype(np.float32),
    )


def held_out(scenes, targets):
    """Return the held-out data that mixtures are fitted on."""
    return HeldOut(
        np.stack([s.distances for s in scenes]),
        np.stack([s.values == y for s, y in zip(scenes, targets, strict=True)]),
        np.stack([s.weights for s in scenes]),
        np.array([s.p_lm[y] for s, y in zip(scenes, targets, strict=True)]),
        np.array([s.p_lm.max() for s in scenes]),
    )


def perplexity(mixture, held):
    """Return the perplexity of the held-out targets."""
    parts = (held.distances, held.hits, held.weights, held.p_lm, held.p_max)
    return math.exp(-float(np.log(mixture.probability(*parts), dtype=np.float64).mean()))
