"""Check a process's memory budget, and divide it among streamed models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llmaas_hooks import UnmetBudgetError
from llmaas_plugins import process_memory

__all__ = ["MARGIN_BYTES", "Needs", "needed_by", "require", "shares"]

MARGIN_BYTES = 1 << 20
"""Bytes that other plugins leave to streamed models, because the process grows a little between
two looks at it."""
_NOISE_BYTES = 3 << 20
"""Largest difference seen between the sizes of a process at the same point of several runs."""
_MIB = 1 << 20
_STEPS = 60


@dataclass(frozen=True, slots=True)
class Needs:
    """Memory that a streamed model needs, in bytes.

    Attributes:
        n_bytes: All weights that tokens use.
        least: Weights that are kept in any case: the experts of one product.
        passing: Buffers that all other weights are read through.
        growth: Compute buffers that batches have not touched yet. Kept weights are released for
            them.
        prompts: Weights that only prompts use. They are kept in memory that is left.
    """

    n_bytes: int
    least: int
    passing: int
    growth: int
    prompts: int = 0


def needed_by(models: Sequence[Needs]) -> int:
    """Return the bytes that streamed models need if they keep only ``Needs.least``."""
    return sum(one.passing + one.least + one.growth for one in models)


def require(budget: int, process: int, needed: int, n_ctx: int | None = None) -> None:
    """Check that a budget can be met.

    The error names a budget that also works in the next run, where the process may be a little
    larger. It does not count memory that other plugins can release: ``UnmetBudgetError.missing``
    bytes of that would do, if there are as many.

    Args:
        budget: Memory of the process with its models.
        process: Bytes of the process without its models.
        needed: Bytes that the models need at least, with the reserve.
        n_ctx: Tokens of the context that ``needed`` is for; None for contexts that exist.

    Raises:
        UnmetBudgetError: The budget is too small.
    """
    if budget < process + needed:
        context = "" if n_ctx is None else f" with a context of {n_ctx} tokens"
        least = process - process_memory.releasable()
        raise UnmetBudgetError(
            f"a memory_budget of {budget // _MIB} MiB cannot be met, because this process takes "
            f"{least // _MIB} MiB and the model needs {math.ceil(needed / _MIB)} MiB beside its "
            f"weights{context}; expected "
            f"{math.ceil((least + needed + _NOISE_BYTES) / _MIB)} MiB or more. A shorter context "
            "or a smaller n_batch needs less.",
            process + needed - budget,
        )


def shares(budget: int, others: int, models: Sequence[Needs]) -> list[int]:
    """Return the bytes that each model may take for kept weights and growth.

    Weights are kept in proportion to a model's size. Those that only prompts use come after all
    others, of all models.

    Args:
        budget: Memory of the process.
        others: Bytes of the process beside streamed weights.
        models: Needs of all streamed models.

    Raises:
        UnmetBudgetError: The budget cannot be met.
    """
    require(budget, others, process_memory.SPARE_BYTES + needed_by(models))
    room = budget - others - process_memory.SPARE_BYTES - sum(one.passing for one in models)
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
    left = room - sum(_space(one, low) for one in models)
    wanted = sum(one.prompts for one in models)
    share = min(1.0, max(0, left) / wanted) if wanted and low >= 1 else 0.0
    return [_space(one, low) + int(share * one.prompts) for one in models]


def _space(model: Needs, share: float) -> int:
    """Return the bytes for kept weights and growth; growth may take the space of kept weights."""
    if share >= 1:
        return model.n_bytes + model.growth
    return max(int(share * model.n_bytes), model.least + model.growth)
