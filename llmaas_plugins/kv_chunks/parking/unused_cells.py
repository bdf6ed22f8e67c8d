"""Cells that an app asked for and does not use: interrupted requests stay in them.

A request that others interrupt comes back, so its cells are kept like those of a parked context,
without any cells added for that. There must be room for the prompt of the request that interrupts,
and for an answer. If the answer gets too long, the host empties the parked sequences, and the
interrupted request is restored from its chunks.
"""

from __future__ import annotations

from llama_cpp import llama_cpp

from llmaas_hooks import CellMemory, Engine
from llmaas_plugins.kv_chunks.parking.cell_budget import ParkedCellBudget
from llmaas_plugins.kv_chunks.parking.parked_contexts import ParkedContexts
from llmaas_plugins.kv_chunks.store.ram_space import RamSpace
from llmaas_plugins.model.cell_sizes import CELL_STEP, token_bytes

__all__ = ["UnusedCells", "cells_for"]

_ANSWER_TOKENS = 64
"""Cells that are left to the answer of the request that interrupts."""


class UnusedCells:
    """Cells that the requests of one engine leave to those that they interrupt."""

    def __init__(self, engine: Engine, parking: ParkedContexts, step: int) -> None:
        """Set the limit of ``parking``, the parked contexts of ``engine``, in such steps."""
        self._n = int(llama_cpp.llama_n_ctx(engine.ctx))
        self._parking = parking
        self._step = step

    def balance(self, n_resident: int, n_prompt: int) -> bool:  # noqa: ARG002  as spare cells
        """Set the limit of parked contexts by the next prompt; call this before each switch.

        Args:
            n_resident: Tokens in sequence 0.
            n_prompt: Tokens that sequence 0 will have after the switch.

        Returns:
            False: all cells keep what they hold.
        """
        n_left = self._n - n_prompt - _ANSWER_TOKENS
        self._parking.limit = max(0, n_left // self._step * self._step)
        return False

    def stats(self) -> dict[str, int]:
        """Return counters for the plugin's status."""
        return {"parked_limit": self._parking.limit}


def cells_for(
    engine: Engine,
    parking: ParkedContexts | None,
    space: RamSpace,
    memory: CellMemory | None,
    *,
    is_exact: bool,
) -> ParkedCellBudget | UnusedCells | None:
    """Return the cells of an engine in which contexts are parked.

    Args:
        engine: Engine that has the cells.
        parking: Its parked contexts; None if there can be none.
        space: RAM tier that lends the memory of spare cells.
        memory: Memory of the cells, or None if it cannot be released.
        is_exact: Whether a context in the app's own cells takes them up to a multiple of 256.
    """
    if parking is None:
        return None
    if not engine.n_spare:
        return UnusedCells(engine, parking, CELL_STEP if is_exact else 1)
    n_bytes = token_bytes(engine.model, engine.llama.context_params)
    return ParkedCellBudget(engine, parking, space, memory, n_bytes)
