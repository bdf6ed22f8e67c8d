"""How unevenly busy the channels, heads and neurons of random models are.

The scales of channels are lognormal, with an expected mean square of 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["ACTIVITIES", "Activity"]

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Activity:
    """Standard deviations of the logarithm of the channels' scales, and outliers.

    Attributes:
        attn_qkv: Inputs of queries, keys and values.
        value_heads: Heads of values, each as a whole.
        values: Values within a head.
        ffn_up: Inputs of the feed-forward block.
        neurons: Neurons of the feed-forward block.
        n_outliers: Channels of the residual stream that are large in every layer.
        outlier_scale: Scale of these channels behind each norm.
        source: Origin of the numbers, as a sentence.
    """

    attn_qkv: float
    value_heads: float
    values: float
    ffn_up: float
    neurons: float
    n_outliers: int
    outlier_scale: float
    source: str

    def norm(self, rng: np.random.Generator, family: str, outliers: NDArray[np.intp], n: int
             ) -> Floats:  # fmt: skip
        """Return the weights of a norm whose outputs ``family`` reads."""
        found = _scales(rng, self.attn_qkv if family == "attn_norm" else self.ffn_up, n)
        found[outliers] = self.outlier_scale
        return found

    def value_rows(self, rng: np.random.Generator, n_heads: int, head_dim: int) -> Floats:
        """Return the scales of the rows of a matrix of values."""
        heads = _scales(rng, self.value_heads, n_heads)
        return np.repeat(heads, head_dim) * _scales(rng, self.values, n_heads * head_dim)

    def neuron_rows(self, rng: np.random.Generator, n: int) -> Floats:
        """Return the scales of the rows of ``ffn_up``."""
        return _scales(rng, self.neurons, n)


def _scales(rng: np.random.Generator, sigma: float, n: int) -> Floats:
    return np.exp(sigma * rng.standard_normal(n) - sigma**2).astype(np.float32)


ACTIVITIES: Mapping[str, Activity] = {
    "reference": Activity(
        0.27, 0.49, 0.38, 0.18, 0.35, 0, 1.0,
        "The packaged model's channels, measured by `python -m llmaas_eval.sparse`; heads have "
        "64 % of the variance of values, as in its weights.",
    ),
    "published": Activity(
        0.27, 0.49, 0.38, 0.18, 0.35, 6, 20.0,
        "6 channels are 20 times as large as others in every layer, as LLM.int8() "
        "(arXiv:2208.07339) reports of models of 6.7 B; all else is the packaged model's.",
    ),
}  # fmt: skip
"""Sets of statistics by name."""
