"""One memory budget for a process: whether it can be met, and how streamed models share it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llmaas_hooks import BudgetError

__all__ = ["SPARE_BYTES", "Needs", "least_of", "require", "shares"]

SPARE_BYTES = 6 << 20
"""For what grows beside weights: the app's own objects, a batch's logits."""
_MIB = 1 << 20
_STEPS = 60


@dataclass(frozen=True, slots=True)
class Needs:
    """Memory that a streamed model needs, in bytes.

    Attributes:
        n_bytes: Weights that could be kept.
        least: Weights that are kept in any case: a product's experts.
        passing: What other weights are read through.
        growth: What its batches may compute in, and have not touched yet. Kept weights make way.
    """

    n_bytes: int
    least: int
    passing: int
    growth: int


def least_of(others: int, models: Sequence[Needs]) -> int:
    """Return the least budget: everything but kept weights.

    Args:
        others: Bytes that the process has beside streamed weights.
        models: All that are streamed.
    """
    return others + SPARE_BYTES + sum(one.passing + one.least + one.growth for one in models)


def require(budget: int, least: int) -> None:
    """See that a budget can be met.

    Raises:
        BudgetError: It cannot.
    """
    if budget < least:
        raise BudgetError(
            f"a memory_budget of {budget // _MIB} MiB cannot be met; expected "
            f"{math.ceil(least / _MIB)} MiB or more. A shorter context or a smaller n_batch takes "
            "less."
        )


def shares(budget: int, others: int, models: Sequence[Needs]) -> list[int]:
    """Return the bytes of weights that each model may keep: by size, as far as each can use it.

    Args:
        budget: Memory of the process.
        others: Bytes that it has beside streamed weights.
        models: All that are streamed.

    Raises:
        BudgetError: The budget cannot be met.
    """
    require(budget, least_of(others, models))
    room = budget - others - SPARE_BYTES - sum(one.passing for one in models)
    low, high = 0.0, 1.0  # of each model, so much of its weights; what batches grow by fits, too
    if sum(_space(one, high) for one in models) > room:
        for _ in range(_STEPS):
            middle = (low + high) / 2
            if sum(_space(one, middle) for one in models) > room:
                high = middle
            else:
                low = middle
    else:
        low = high
    return [min(_space(one, low), one.n_bytes) for one in models]


def _space(model: Needs, share: float) -> int:
    """Return the bytes for kept weights and growth: weights make way for what fits into them."""
    if share >= 1:
        return model.n_bytes + model.growth
    return max(int(share * model.n_bytes), model.least + model.growth)
