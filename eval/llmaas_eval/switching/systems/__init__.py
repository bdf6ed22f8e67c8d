"""The systems that are compared; each as strong as its idea allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from llmaas_eval.switching.systems.base import BudgetTooSmallError, Entered, Setting, System
from llmaas_eval.switching.systems.caches import DiskCache, RAMCache
from llmaas_eval.switching.systems.in_cells import Killing, Swapping
from llmaas_eval.switching.systems.ours import Ours
from llmaas_eval.switching.systems.paged import PagedSwapping, QuantisedCells
from llmaas_eval.switching.systems.quantised import QuantisedSwapping

__all__ = ["SYSTEMS", "BudgetTooSmallError", "Entered", "Setting", "System"]

SYSTEMS: Mapping[str, Callable[[Setting], System]] = {
    "ours": Ours,
    "LMK": Killing,
    "Swapping": Swapping,
    "vLLM-S": PagedSwapping,
    "vLLM-SQ": QuantisedSwapping,
    "vLLM-SQ in cells": QuantisedCells,
    "LlamaRAMCache": RAMCache,
    "LlamaDiskCache": DiskCache,
}
"""By the names that the paper and llama-cpp-python give them."""
