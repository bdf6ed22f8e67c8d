"""The next token's distribution: the model's, mixed with what followed the nearest stored states.

With d = squared Euclidean distance / theta (Eq 32) and the k nearest pairs K::

    p_kNN(v)  ~  sum of weight * exp(-d) over the pairs of K whose value is v            (Eq 2)
    w         =  alpha * (1 - beta * MaxProb) * S / (S + exp(-far / theta))              (Eq 33)
    p(v)      =  (1 - w) * p_LM(v) + w * p_kNN(v)                                        (Eq 1)

S is the sum over all of K. The last factor is not in the paper: it is one more neighbour, at the
distance ``far``, that says what the model says, so states that are like none of the stored ones are
left to the model. An infinite ``far`` gives Eq 33. Weights are 1 unless a selection gave others.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

__all__ = ["Mixture", "share"]

Floats = npt.NDArray[np.float32]

_MOST = 1e30
"""Beyond, there is no computing in 32 bits."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """What was fitted on held-out text.

    Attributes:
        alpha: Largest weight of the neighbours, 0 to 1.
        beta: How much less a model gets that is sure, 0 to 1 (Eq 33).
        theta: What squared distances are divided by, above 0 (Eq 32).
        far: Squared distance from which on the neighbours count less than the model; infinite in
            the paper.
    """

    alpha: float
    beta: float
    theta: float
    far: float = math.inf

    def __post_init__(self) -> None:
        """Refuse what is out of range.

        Raises:
            ValueError: It is.
        """
        for name in ("alpha", "beta"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be 0 to 1, found {getattr(self, name)}")
        is_scale = 1 / _MOST < self.theta < _MOST
        if not (is_scale and (-_MOST < self.far < _MOST or self.far == math.inf)):
            raise ValueError(f"theta must be above 0 and far a number, found {self}")

    def as_json(self) -> dict[str, float | None]:
        """Plain JSON types."""
        return {**asdict(self), "far": None if math.isinf(self.far) else self.far}

    @classmethod
    def from_json(cls, values: Any) -> Self:
        """What ``as_json`` gave.

        Raises:
            ValueError: It is something else.
        """
        try:
            fields = {name: float(values[name]) for name in ("alpha", "beta", "theta")}
            far = values["far"]
            return cls(**fields, far=math.inf if far is None else float(far))
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"found {values!r}, expected alpha, beta, theta and far") from error

    def probability(  # noqa: PLR0913, PLR0917 -- all that it depends on
        self,
        distances: Floats,
        hits: npt.NDArray[np.bool_],
        weights: Floats,
        p_lm: Floats,
        p_max: Floats,
        trust: Floats | float = 1.0,
    ) -> Floats:
        """p(y) of targets, without looking at any other token.

        Args:
            distances: Squared distances of each target's neighbours, shape (n, k).
            hits: Which of them have the target as value.
            weights: Theirs.
            p_lm: The model's probability of each target, shape (n,).
            p_max: Its largest.
            trust: What the weight is multiplied by, see ``trust``.
        """
        hit, total = share(distances, hits, weights, self.theta, self.far)
        weight = trust * self.alpha * (1 - self.beta * p_max)
        return (1 - weight * total) * p_lm + weight * hit


def share(
    distances: Floats, hits: npt.NDArray[np.bool_], weights: Floats, theta: float, far: float
) -> tuple[Floats, Floats]:
    """Of each target: its part of the neighbours' say, and that of all of them, at most 1.

    What is missing to 1 is the model's: the neighbour at distance ``far``.
    """
    logs = np.log(weights) - distances / np.float32(theta)
    nearest = np.maximum(logs.max(axis=1, keepdims=True), np.float32(-far / theta))
    votes = np.exp(logs - nearest)
    model = np.exp(np.float32(-far / theta) - nearest[:, 0])
    total = votes.sum(axis=1)
    everything = total + model
    return (votes * hits).sum(axis=1) / everything, total / everything
