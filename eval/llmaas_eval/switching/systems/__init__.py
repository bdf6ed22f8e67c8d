"""Systems under comparison, each as strong as its idea allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from llmaas_eval.switching.systems.base import BudgetTooSmallError, Entered, Setting, System
from llmaas_eval.switching.systems.caches import DiskCache, RAMCache
from llmaas_eval.switching.systems.in_cells import Killing, Swapping
from llmaas_eval.switching.systems.ours import Ours
from llmaas_eval.switching.systems.paged import PagedSwapping, QuantizedCells
from llmaas_eval.switching.systems.quantized import QuantizedSwapping

__all__ = ["SYSTEMS", "BudgetTooSmallError", "Entered", "Setting", "System"]

SYSTEMS: Mapping[str, Callable[[Setting], System]] = {
    "ours": Ours,
    "LMK": Killing,
    "Swapping": Swapping,
    "vLLM-S": PagedSwapping,
    "vLLM-SQ": QuantizedSwapping,
    "vLLM-SQ in cells": QuantizedCells,
    "LlamaRAMCache": RAMCache,
    "LlamaDiskCache": DiskCache,
}
"""Systems by the names that the paper and llama-cpp-python give them."""
