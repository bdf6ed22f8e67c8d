"""Check a process's memory budget, and divide it among streamed models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llmaas_hooks import BudgetError

__all__ = ["SPARE_BYTES", "Needs", "least_of", "require", "shares"]

SPARE_BYTES = 6 << 20
"""Reserve for memory that grows beside weights: the app's own objects, the logits of a batch."""
_MIB = 1 << 20
_STEPS = 60


@dataclass(frozen=True, slots=True)
class Needs:
    """Memory that a streamed model needs, in bytes.

    Attributes:
        n_bytes: All weights that could be kept.
        least: Weights that are kept in any case: the experts of one product.
        passing: Buffers that all other weights are read through.
        growth: Compute buffers that batches have not touched yet. Kept weights are released for
            them.
    """

    n_bytes: int
    least: int
    passing: int
    growth: int


def least_of(others: int, models: Sequence[Needs]) -> int:
    """Return the least budget, which has room for no kept weights beyond ``Needs.least``.

    Args:
        others: Bytes of the process beside streamed weights.
        models: Needs of all streamed models.
    """
    return others + SPARE_BYTES + sum(one.passing + one.least + one.growth for one in models)


def require(budget: int, least: int) -> None:
    """Check that a budget can be met.

    Raises:
        BudgetError: The budget is below ``least``.
    """
    if budget < least:
        raise BudgetError(
            f"a memory_budget of {budget // _MIB} MiB cannot be met; expected "
            f"{math.ceil(least / _MIB)} MiB or more. A shorter context or a smaller n_batch needs "
            "less."
        )


def shares(budget: int, others: int, models: Sequence[Needs]) -> list[int]:
    """Return the bytes of weights that each model may keep, in proportion to its size.

    Args:
        budget: Memory of the process.
        others: Bytes of the process beside streamed weights.
        models: Needs of all streamed models.

    Raises:
        BudgetError: The budget cannot be met.
    """
    require(budget, least_of(others, models))
    room = budget - others - SPARE_BYTES - sum(one.passing for one in models)
    # Bisect for the share of its weights that each model keeps, so that growth fits, too.
    low, high = 0.0, 1.0
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
    """Return the bytes for kept weights and growth; growth may take the space of kept weights."""
    if share >= 1:
        return model.n_bytes + model.growth
    return max(int(share * model.n_bytes), model.least + model.growth)
