"""Contexts as sequences of one cache as large as the budget: LMK, Swapping and vLLM-S.

The engine's cells are all they keep in memory. A context that is called has its cells there; room
for it is made by taking them from those called longest ago.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from typing import ClassVar

import numpy as np
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
from llmaas_plugins.kv_chunks.extents import page_round

__all__ = ["Killing", "PagedSwapping", "Swapping"]

_IO_BYTES = 2 << 20
_HEAD_BYTES = 12 << 10  # of a chunk's blob: positions, and what is said of each layer

_Part = list[int]
"""Chunks of one context, neighbours in its file."""


class _InCells(System):
    """What the three have in common."""

    def __init__(self, setting: Setting, buffer_bytes: int) -> None:
        """Size the cache by what the budget leaves beside the buffers."""
        n_cells = (setting.budget - SLACK_BYTES - buffer_bytes) // setting.token_bytes
        if n_cells < app_cells(setting.max_tokens):
            raise BudgetTooSmallError(f"{setting.budget} bytes are room for {n_cells} cells")
        self._engine = SequenceEngine(setting.model, n_cells, setting.contexts)
        super().__init__(setting, self._engine.geometry)
        self._resident: dict[int, int] = {}
        """Tokens in the cells by context, the one called longest ago first."""

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
        """Take at least ``n_cells`` from a context."""

    @abstractmethod
    def _load(self, step: Step, n_resident: int) -> int:
        """Bring what follows the resident tokens into the cells; tokens loaded."""


class Killing(_InCells):
    """LMK: under memory pressure a context is killed, and computed again when it is called."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting, 0)

    def _reclaim(self, context: int, n_cells: int) -> None:
        self._cut(context, 0)

    def _load(self, step: Step, n_resident: int) -> int:
        return 0


class PagedSwapping(_InCells):
    """vLLM-S: chunks are swapped out when their cells are needed, unless the disk has them."""

    CHUNK_TOKENS: ClassVar[int] = 16

    def __init__(self, setting: Setting) -> None:
        self._chunk_tokens = int(setting.options.get("chunk_tokens", self.CHUNK_TOKENS))
        self._place_bytes = page_round(self._chunk_tokens * setting.token_bytes + _HEAD_BYTES)
        self._per_io = max(1, _IO_BYTES // self._place_bytes)
        super().__init__(setting, N_BUFFERS * self._per_io * self._place_bytes)
        self._pipe = Pipe(self._per_io * self._place_bytes)
        self._n_chunks = -(-setting.max_tokens // self._chunk_tokens)
        n_places = setting.contexts * self._n_chunks
        self._file = open_direct(setting.folder / "swap", n_places * self._place_bytes)
        self._is_clean = np.zeros((setting.contexts, self._n_chunks), dtype=np.bool_)

    def close(self) -> None:
        self._pipe.close()
        os.close(self._file)
        super().close()

    def _grown(self, step: Step) -> None:
        n_same = 0 if step.slides else len(step.before) // self._chunk_tokens
        self._is_clean[step.context, n_same:] = False
        super()._grown(step)

    def _reclaim(self, context: int, n_cells: int) -> None:
        n_had = self._resident[context]
        n_kept = (n_had - n_cells) // self._chunk_tokens * self._chunk_tokens
        chunks = range(n_kept // self._chunk_tokens, -(-n_had // self._chunk_tokens))
        self._write(context, [i for i in chunks if not self._is_clean[context, i]], n_had)
        self._is_clean[context, chunks.start : chunks.stop] = True
        self._cut(context, n_kept)

    def _write(self, context: int, chunks: list[int], n_tokens: int) -> None:
        def give(part: _Part, buffer: NDArray[np.uint8]) -> None:
            for i, chunk in enumerate(part):
                start = chunk * self._chunk_tokens
                end = min(start + self._chunk_tokens, n_tokens)
                self._engine.read(context, start, end, buffer[i * self._place_bytes :])

        def empty(part: _Part, buffer: NDArray[np.uint8]) -> None:
            used = buffer[: self._used_bytes(part, n_tokens)]
            write_at(self._file, self._place(context, part[0]), used)

        self._pipe.store(self._parts(chunks), give, empty)

    def _load(self, step: Step, n_resident: int) -> int:
        n_tokens = len(step.before)
        chunks = range(n_resident // self._chunk_tokens, -(-n_tokens // self._chunk_tokens))

        def fill(part: _Part, buffer: NDArray[np.uint8]) -> None:
            used = buffer[: self._used_bytes(part, n_tokens)]
            read_at(self._file, self._place(step.context, part[0]), used)

        def take(part: _Part, buffer: NDArray[np.uint8]) -> None:
            for i, chunk in enumerate(part):
                start = i * self._place_bytes
                self._engine.put(step.context, buffer[start:][: self._bytes(chunk, n_tokens)])

        if n_resident < n_tokens:
            self._pipe.load(self._parts(chunks), fill, take)
            self._engine.finish()
        return n_tokens - n_resident

    def _parts(self, chunks: range | list[int]) -> list[_Part]:
        """Neighbours that travel together."""
        runs = np.split(np.array(chunks), np.flatnonzero(np.diff(chunks) != 1) + 1)
        step = self._per_io
        return [run[i : i + step].tolist() for run in runs for i in range(0, len(run), step)]

    def _place(self, context: int, chunk: int) -> int:
        return (context * self._n_chunks + chunk) * self._place_bytes

    def _bytes(self, chunk: int, n_tokens: int) -> int:
        """Bytes of a chunk of a context of ``n_tokens``."""
        rest = n_tokens - chunk * self._chunk_tokens
        return self._engine.blob_bytes(min(self._chunk_tokens, rest))

    def _used_bytes(self, part: _Part, n_tokens: int) -> int:
        last = page_round(self._bytes(part[-1], n_tokens))
        return (len(part) - 1) * self._place_bytes + last


class Swapping(PagedSwapping):
    """Whole contexts are written when their cells are needed, and read when they are called."""

    CHUNK_TOKENS: ClassVar[int] = 64

    def _reclaim(self, context: int, n_cells: int) -> None:
        n_had = self._resident[context]
        self._write(context, list(range(-(-n_had // self._chunk_tokens))), n_had)
        self._cut(context, 0)
