"""Full datastores to select from, and the value of subsets, computed literally as in the paper."""

from __future__ import annotations

import itertools
import math

import numpy as np

from llmaas_plugins.knn_lm.selection.objective import Objective

OBJECTIVE = Objective(theta=1.0)
HOWS = ["draw", "top"]


class Full:
    """Pairs in memory; records which keys were requested."""

    def __init__(self, keys, values, p_lm):
        self.pairs = np.asarray(keys, np.float32)
        self.values = np.asarray(values, np.int32)
        self.p_lm = np.asarray(p_lm, np.float32)
        self.n_dims = self.pairs.shape[1]
        self.asked = []

    def __len__(self):
        return len(self.values)

    def keys(self, indices):
        self.asked.append(indices.copy())
        return self.pairs[indices]


def random_full(seed, n, n_dims=3, n_values=4, spread=1.0):
    """Return random pairs with few distinct values."""
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((n, n_dims)) * spread
    return Full(keys, rng.integers(0, n_values, n), rng.uniform(0.001, 0.999, n))


def gains(full, objective):
    """Return how much each pair (column) adds to p(y|x) of each pair (row), by Eq. 4."""
    n = len(full)
    found = np.zeros((n, n))
    for i, j in itertools.product(range(n), range(n)):
        if full.values[i] == full.values[j]:
            far = sum((float(a) - float(b)) ** 2 for a, b in zip(*full.pairs[[i, j]], strict=True))
            found[i, j] = objective.alpha * objective.c * math.exp(-far / objective.theta)
    return found


def worth(full, objective, *subsets):
    """Return f(S) = F(S) - F({}) of each subset (Eqs. 3 and 4)."""
    is_in = np.zeros((len(subsets), len(full)))
    for row, subset in zip(is_in, subsets, strict=True):
        row[list(subset)] = 1
    alone = (1 - objective.alpha) * full.p_lm.astype(np.float64)
    return np.log1p(is_in @ gains(full, objective).T / alone).sum(axis=1)


def best_worth(full, objective, size):
    """Return f(S*), the maximum over all subsets of this size."""
    return worth(full, objective, *itertools.combinations(range(len(full)), size)).max()


def same(one, other):
    return np.array_equal(one.indices, other.indices) and np.array_equal(one.weights, other.weights)
