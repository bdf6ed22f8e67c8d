"""Contexts as sequences of one cache as large as the budget: LMK, Swapping, and vLLM-S (``paged``).

These systems keep nothing in memory but the engine's cells. The context that is called has its
cells there. If cells are needed, the system takes them from the contexts called longest ago.
"""

from __future__ import annotations

import os
from abc import abstractmethod

import numpy as np
from llama_cpp import llama_cpp
from numpy.typing import NDArray

from llmaas_eval.switching.engine import SequenceEngine
from llmaas_eval.switching.steps import Step
from llmaas_eval.switching.systems.base import (
    SLACK_BYTES,
    BudgetTooSmallError,
    Entered,
    Setting,
    System,
    app_cells,
)
from llmaas_eval.switching.systems.pipe import N_BUFFERS, Pipe, open_direct, read_at, write_at
from llmaas_plugins.kv_chunks.store.extents import page_round

__all__ = ["HEAD_BYTES", "InCells", "Killing", "Swapping"]

HEAD_BYTES = 12 << 10
"""Upper bound of the bytes in a blob of some cells that are not values."""
_PIECE_TOKENS = 64


class InCells(System):
    """Base of the systems whose contexts are sequences."""

    cell_type = llama_cpp.GGML_TYPE_F16

    def __init__(self, setting: Setting, buffer_bytes: int) -> None:
        """Make the cache as large as the budget allows beside the buffers."""
        n_cells = (setting.budget - SLACK_BYTES - buffer_bytes) // setting.token_bytes
        if n_cells < app_cells(setting.max_tokens):
            raise BudgetTooSmallError(
                f"{setting.budget} bytes hold {n_cells} cells, too few for one context"
            )
        self._engine = SequenceEngine(setting.model, n_cells, setting.contexts, self.cell_type)
        super().__init__(setting, self._engine.geometry)
        self._resident: dict[int, int] = {}
        """Number of tokens in the cells by context; the context called longest ago is first."""

    @property
    def n_cells(self) -> int:
        return self._engine.n_cells

    def enter(self, step: Step) -> Entered:
        n_resident = self._resident.pop(step.context, 0)
        self._resident[step.context] = n_resident
        self._make_room(step.context, step.n_most - n_resident)
        n_loaded = self._load(step, n_resident)
        n_missing = len(step.before) - n_resident - n_loaded
        return Entered(n_resident=n_resident, n_disk=n_loaded, n_missing=n_missing)

    def cells(self, step: Step) -> NDArray[np.uint8]:
        n_tokens = len(step.after)
        blob = np.zeros(self._engine.blob_bytes(n_tokens), dtype=np.uint8)
        self._engine.read(step.context, 0, n_tokens, blob)
        return blob

    def close(self) -> None:
        self._engine.close()

    def _make_room(self, called: int, n_cells: int) -> None:
        n_free = self.n_cells - sum(self._resident.values())
        others = [(context, n) for context, n in self._resident.items() if n and context != called]
        for context, n_had in others:
            if n_free >= n_cells:
                return
            self._reclaim(context, min(n_had, n_cells - n_free))
            n_free += n_had - self._resident[context]

    def _cut(self, context: int, n_tokens: int) -> None:
        self._engine.remove(context, n_tokens)
        self._resident[context] = n_tokens

    def _append(self, context: int, blob: NDArray[np.uint8]) -> None:
        self._engine.put(context, blob)

    def _grown(self, step: Step) -> None:
        self._engine.finish()
        self._resident[step.context] = len(step.after)

    @abstractmethod
    def _reclaim(self, context: int, n_cells: int) -> None:
        """Take at least ``n_cells`` cells from a context."""

    @abstractmethod
    def _load(self, step: Step, n_resident: int) -> int:
        """Load the tokens after the resident ones into the cells; return how many were loaded."""


class Killing(InCells):
    """LMK: under memory pressure a context is killed, and computed again at its next call."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting, 0)

    def _reclaim(self, context: int, n_cells: int) -> None:
        self._cut(context, 0)

    def _load(self, step: Step, n_resident: int) -> int:
        return 0


class Swapping(InCells):
    """Swapping: a context is written when its cells are needed, and read at its next call."""

    def __init__(self, setting: Setting) -> None:
        self._place_bytes = page_round(_PIECE_TOKENS * setting.token_bytes + HEAD_BYTES)
        super().__init__(setting, N_BUFFERS * self._place_bytes)
        self._pipe = Pipe(self._place_bytes)
        self._n_places = -(-setting.max_tokens // _PIECE_TOKENS)
        n_bytes = setting.contexts * self._n_places * self._place_bytes
        self._file = open_direct(setting.folder / "swap", n_bytes)

    def close(self) -> None:
        self._pipe.close()
        os.close(self._file)
        super().close()

    def _reclaim(self, context: int, n_cells: int) -> None:
        def give(piece: range, buffer: NDArray[np.uint8]) -> None:
            self._engine.read(context, piece.start, piece.stop, buffer)

        def empty(piece: range, buffer: NDArray[np.uint8]) -> None:
            used = buffer[: page_round(self._engine.blob_bytes(len(piece)))]
            write_at(self._file, self._offset(context, piece), used)

        self._pipe.store(_pieces(self._resident[context]), give, empty)
        self._cut(context, 0)

    def _load(self, step: Step, n_resident: int) -> int:
        def fill(piece: range, buffer: NDArray[np.uint8]) -> None:
            used = buffer[: page_round(self._engine.blob_bytes(len(piece)))]
            read_at(self._file, self._offset(step.context, piece), used)

        def take(piece: range, buffer: NDArray[np.uint8]) -> None:
            self._engine.put(step.context, buffer[: self._engine.blob_bytes(len(piece))])

        if n_resident:
            return 0
        self._pipe.load(_pieces(len(step.before)), fill, take)
        self._engine.finish()
        return len(step.before)

    def _offset(self, context: int, piece: range) -> int:
        place = context * self._n_places + piece.start // _PIECE_TOKENS
        return place * self._place_bytes


def _pieces(n_tokens: int) -> list[range]:
    starts = range(0, n_tokens, _PIECE_TOKENS)
    return [range(start, min(start + _PIECE_TOKENS, n_tokens)) for start in starts]
