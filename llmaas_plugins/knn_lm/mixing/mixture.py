"""The next token's distribution: the model's, mixed with targets of the nearest stored states.

With d = squared Euclidean distance / theta (Eq 32) and the k nearest pairs K::

    p_kNN(v)  ~  sum of weight * exp(-d) over the pairs of K whose value is v            (Eq 2)
    w         =  alpha * (1 - beta * MaxProb) * S / (S + exp(-far / theta))              (Eq 33)
    p(v)      =  (1 - w) * p_LM(v) + w * p_kNN(v)                                        (Eq 1)

S is the sum over all of K. The last factor of w is not in the paper. It acts as one more neighbor,
at squared distance ``far``, that votes for the model's own distribution. States unlike all stored
ones are therefore left to the model. An infinite ``far`` gives Eq 33. Weights are 1 unless a
selection set others.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

__all__ = ["Mixture", "neighbor_share"]

Floats = npt.NDArray[np.float32]

_MOST = 1e30
"""Bound beyond which 32-bit arithmetic fails."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """Parameters of a mixture, fitted on held-out text.

    Attributes:
        alpha: Largest weight of the neighbors, 0 to 1.
        beta: How much the neighbors' weight drops when the model is sure, 0 to 1 (Eq 33).
        theta: Divisor of squared distances, above 0 (Eq 32).
        far: Squared distance beyond which a neighbor counts less than the model; infinite in the
            paper.
    """

    alpha: float
    beta: float
    theta: float
    far: float = math.inf

    def __post_init__(self) -> None:
        """Refuse parameters out of range.

        Raises:
            ValueError: A parameter is out of range.
        """
        for name in ("alpha", "beta"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be 0 to 1, found {getattr(self, name)}")
        is_scale = 1 / _MOST < self.theta < _MOST
        if not (is_scale and (-_MOST < self.far < _MOST or self.far == math.inf)):
            raise ValueError(f"theta must be above 0 and far a number, found {self}")

    def as_json(self) -> dict[str, float | None]:
        """Return the parameters as JSON values."""
        return {**asdict(self), "far": None if math.isinf(self.far) else self.far}

    @classmethod
    def from_json(cls, values: Any) -> Self:
        """Make a mixture from the result of ``as_json``.

        Raises:
            ValueError: The values are not such a result.
        """
        try:
            fields = {name: float(values[name]) for name in ("alpha", "beta", "theta")}
            far = values["far"]
            return cls(**fields, far=math.inf if far is None else float(far))
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"found {values!r}, expected alpha, beta, theta and far") from error

    def probability(  # noqa: PLR0913, PLR0917 -- the formula's inputs
        self,
        distances: Floats,
        hits: npt.NDArray[np.bool_],
        weights: Floats,
        p_lm: Floats,
        p_max: Floats,
        trust: Floats | float = 1.0,
    ) -> Floats:
        """Return p(y) of targets, without computing the probability of any other token.

        Args:
            distances: Squared distances of each target's neighbors, shape (n, k).
            hits: Whether each neighbor has the target as value, shape (n, k).
            weights: Weights of the neighbors, shape (n, k).
            p_lm: The model's probability of each target, shape (n,).
            p_max: The model's largest probability at each target, shape (n,).
            trust: Factor on the neighbors' weight, see ``trust``.
        """
        hit, total = neighbor_share(distances, hits, weights, self.theta, self.far)
        weight = trust * self.alpha * (1 - self.beta * p_max)
        return (1 - weight * total) * p_lm + weight * hit


def neighbor_share(
    distances: Floats, hits: npt.NDArray[np.bool_], weights: Floats, theta: float, far: float
) -> tuple[Floats, Floats]:
    """Return each target's share of the neighbor mass, and the total mass (at most 1).

    The rest of the mass, up to 1, is the model's: it belongs to the neighbor at distance ``far``.
    """
    logs = np.log(weights) - distances / np.float32(theta)
    nearest = np.maximum(logs.max(axis=1, keepdims=True), np.float32(-far / theta))
    votes = np.exp(logs - nearest)
    model = np.exp(np.float32(-far / theta) - nearest[:, 0])
    total = votes.sum(axis=1)
    everything = total + model
    return (votes * hits).sum(axis=1) / everything, total / everything
