"""Predict which mode is faster with a memory budget, from the time per token of each.

The rows ``exact`` and ``sparse`` describe the engine (``engine_modes``). The rows ``pipeline`` are
ActiveFlow's cost model (``pipeline``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from llmaas_plugins.flash_weights.cost_model import Search, paper_sparsity, search_group
from llmaas_plugins.flash_weights.engine_modes import (
    Hardware,
    Keeps,
    Prediction,
    least_budget,
    predict_exact,
    predict_sparse,
    predict_streamed,
)
from llmaas_plugins.flash_weights.memory import require
from llmaas_plugins.flash_weights.model_sizes import ModelSizes
from llmaas_plugins.flash_weights.pipeline import predict_pipeline, system_of

__all__ = ["MOST_SPARSITY", "ModePlan", "check_budget", "make_plan"]

MOST_SPARSITY = 0.95
_LEAST_SPEEDUP = 1.25
"""Least speedup at which the sparse mode is recommended, because it changes the text.

The sparse mode is never recommended when all weights fit.
"""


@dataclass(frozen=True, slots=True)
class ModePlan:
    """Comparison of the modes.

    Attributes:
        budget: Memory of the process.
        sparsity: Requested sparsity, or ActiveFlow's for the budget.
        exact: Prediction of the exact mode.
        sparse: Predictions of the sparse mode, by cache, without and with preloading; empty if the
            model has no channels.
        pipeline: Prediction of each group size that the search tried.
        search: Search for ActiveFlow's group size; None without channels.
        recommended: The recommended prediction, one of the engine's.
    """

    budget: int
    sparsity: float
    exact: Prediction
    sparse: tuple[Prediction, ...]
    pipeline: tuple[Prediction, ...]
    search: Search | None
    recommended: Prediction

    @property
    def fastest_sparse(self) -> Prediction | None:
        """Fastest sparse row that works with the budget, or None."""
        return _fastest(self.budget, self.sparse)


def make_plan(
    sizes: ModelSizes, machine: Hardware, budget: int, sparsity: float | None = None
) -> ModePlan:
    """Compare the engine's modes and ActiveFlow's pipeline under a budget.

    Args:
        sizes: Sizes of the model.
        machine: Machine that runs the model.
        budget: Memory of the process.
        sparsity: Share of values left out; None uses the paper's ``1 - M_max / S_m``.

    Raises:
        UnmetBudgetError: No mode works with this budget.
    """
    check_budget(sizes, machine.process, budget)
    exact = predict_exact(sizes, machine, budget)
    if not sizes.channels:
        return ModePlan(budget, 0.0, exact, (), (), None, exact)
    chosen = sparsity
    if chosen is None:
        chosen = min(paper_sparsity(sizes.in_channels, budget), MOST_SPARSITY)
    system = system_of(sizes, machine, budget, chosen)
    kinds: tuple[Keeps, ...] = ("busiest", "shared")
    sparse = tuple(
        predict_sparse(sizes, machine, budget, chosen, keeps=keeps, preload=preload)
        for preload in (False, True)
        for keeps in kinds
    )
    # Grouped channels of a single layer are not contiguous, so they cannot be read ahead.
    if sparse[0].group_layers == 1:
        sparse = (predict_streamed(sizes, machine, budget, chosen), *sparse)
    recommended = _recommended(exact, _fastest(budget, sparse))
    search = search_group(system, chosen)
    pipeline = tuple(predict_pipeline(sizes, machine, system, cost) for cost in search.tried)
    return ModePlan(budget, chosen, exact, sparse, pipeline, search, recommended)


def check_budget(sizes: ModelSizes, process: int, budget: int, n_ctx: int | None = None) -> None:
    """Check that a model runs within a budget in the exact mode, which needs the least memory.

    Args:
        sizes: Sizes of the model.
        process: Bytes of a process without the model.
        budget: Memory of the process with the model.
        n_ctx: Tokens of the context, for the error.

    Raises:
        UnmetBudgetError: The budget is too small.
    """
    require(budget, process, least_budget(sizes, 0), n_ctx)


def _fastest(budget: int, rows: Iterable[Prediction]) -> Prediction | None:
    works = (row for row in rows if budget >= row.least_budget)
    return min(works, key=lambda row: row.token_s, default=None)


def _recommended(exact: Prediction, sparse: Prediction | None) -> Prediction:
    if exact.read == 0 or sparse is None:
        return exact
    return sparse if exact.token_s >= _LEAST_SPEEDUP * sparse.token_s else exact
