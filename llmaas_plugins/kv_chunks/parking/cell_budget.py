"""Memory of spare cells: taken only while parked contexts use them and chunks do not need it.

With few contexts in use, all of them fit into the engine's cells, and switching takes
microseconds. With many, the same memory holds more contexts as encoded chunks. The RAM tier
therefore lends to the cells only what the chunks of all contexts in use would not need. As chunks
grow, fewer contexts may be parked. But written cells keep their memory until all cells are
released at once. A release empties every parked context and the running one, which must then be
loaded again from their chunks. Releases must therefore be rare, so each one halves what may be
lent afterwards.
"""

from __future__ import annotations

import logging
import weakref

from llama_cpp import llama_cpp

from llmaas_hooks import CellMemory, Engine
from llmaas_plugins.kv_chunks.parking.parked_contexts import ParkedContexts
from llmaas_plugins.kv_chunks.parking.sequences import PARKED_SEQUENCES, lie_aside
from llmaas_plugins.kv_chunks.store.ram_space import RamSpace
from llmaas_plugins.model.cell_sizes import CELL_STEP

__all__ = ["ParkedCellBudget"]

_log = logging.getLogger("llmaas.kv_chunks")

_APP_SEQUENCE = 0
_GROWTH_DIVISOR = 16  # 1/16 of the RAM tier stays free for the chunks of the next calls


class ParkedCellBudget:
    """Memory of one engine's spare cells. Use it only while no other thread uses the engine."""

    def __init__(
        self,
        engine: Engine,
        parking: ParkedContexts,
        space: RamSpace,
        memory: CellMemory | None,
        token_bytes: int,
    ) -> None:
        """Start to manage the memory that llama.cpp allocated for all cells at once.

        Args:
            engine: Engine that has the cells.
            parking: Parked contexts, which use the spare cells.
            space: RAM tier that lends the memory.
            memory: Memory of the cells, or None if it cannot be released.
            token_bytes: Bytes of a cell, used if ``memory`` cannot tell.
        """
        self._engine_memory = llama_cpp.llama_get_memory(engine.ctx)
        self._parking = parking
        self._space = space
        self._n_spare = self._max_parked = engine.n_spare
        self._n_seq_max = engine.n_seq_max
        self._has_parked = False  # since the last release; without any, a release gains nothing
        self._n_releases = 0
        self._owner = object()
        self._memory = memory if memory is not None and memory.n else None
        if self._memory is None:
            self._token_bytes, self._app_cells = token_bytes, 0
        else:
            self._token_bytes = self._memory.n_bytes // self._memory.n
            self._app_cells = self._memory.n - engine.n_spare
        weakref.finalize(self, space.close_owner, self._owner)
        if self._memory is None:
            self._borrow_all()

    def balance(self, n_resident: int, n_prompt: int) -> bool:
        """Set the limit of parked contexts by the available memory; call this before each switch.

        Args:
            n_resident: Tokens in sequence 0, which may be parked next.
            n_prompt: Tokens that sequence 0 will have after the switch.

        Returns:
            Whether all cells were released; sequence 0 is then empty and nothing is parked.
        """
        if self._memory is None:
            return False
        lendable, capacity = self._space.lendable_and_capacity(self._owner)
        growth = capacity // _GROWTH_DIVISOR
        free_bytes = lendable - growth
        extra_bytes = max(0, self._memory.touched_bytes - self._app_cells * self._token_bytes)
        self._has_parked |= self._parking.n_cells > 0
        if (
            self._has_parked
            and not lie_aside(self._engine_memory, self._n_seq_max)  # these cannot be released
            and extra_bytes > max(free_bytes + growth // 2, CELL_STEP * self._token_bytes)
        ):
            self._release_all_cells(free_bytes)
            return True
        self._max_parked = max(self._max_parked, self._cells_in(free_bytes // 4))
        limit = min(self._max_parked, self._cells_in(free_bytes))
        n_parked = min(limit, self._parking.n_cells + n_resident)
        self._parking.limit = self._borrow(
            limit, n_parked + n_prompt - self._app_cells, extra_bytes
        )
        return False

    def _borrow(self, limit: int, n_extra: int, extra_bytes: int) -> int:
        """Borrow memory for cells beyond the app's own; return how many cells may be parked.

        Parked contexts may also lie in those of the app's own cells that are not in use, which
        cost nothing extra.

        Args:
            limit: Most cells that may be parked.
            n_extra: Cells beyond the app's own that the next switch needs.
            extra_bytes: Bytes beyond the app's own cells that are in use already.
        """
        wanted = max(extra_bytes, -(-n_extra // CELL_STEP) * CELL_STEP * self._token_bytes)
        lent = self._space.lend(self._owner, wanted)
        return limit if lent == wanted else min(limit, self._cells_in(lent))

    def stats(self) -> dict[str, int]:
        """Return counters for the plugin's status."""
        return {
            "parked_limit": self._parking.limit,
            "collapses": self._n_releases,
        }

    def _release_all_cells(self, free_bytes: int) -> None:
        """Release the memory of all cells, and lend less from now on."""
        assert self._memory is not None
        self._parking.clear()
        llama_cpp.llama_memory_seq_rm(self._engine_memory, _APP_SEQUENCE, -1, -1)
        self._n_releases += 1
        self._has_parked = False
        if not (self._is_empty() and self._memory.release()):
            _log.warning("cannot release the memory of spare cells; it counts as used from now on")
            self._memory = None
            self._borrow_all()
            return
        self._max_parked = self._cells_in(free_bytes // 2)
        self._space.lend(self._owner, 0)
        self._parking.limit = 0  # nothing is parked at this switch: sequence 0 is empty

    def _borrow_all(self) -> None:
        """Borrow the memory of all spare cells for good, whether they are used or not."""
        lent = self._space.lend(self._owner, self._n_spare * self._token_bytes)
        self._parking.limit = self._cells_in(lent)

    def _is_empty(self) -> bool:
        return all(
            llama_cpp.llama_memory_seq_pos_max(self._engine_memory, sequence) < 0
            for sequence in range(PARKED_SEQUENCES.stop)
        )

    def _cells_in(self, n_bytes: int) -> int:
        return max(0, min(self._n_spare, n_bytes // self._token_bytes))
