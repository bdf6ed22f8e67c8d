"""vLLM-SQ: vLLM-S with 8-bit chunks; this suite's int8 codec stands for SmoothQuant."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.switching.engine import SequenceEngine
from llmaas_eval.switching.steps import Step
from llmaas_eval.switching.systems.base import (
    BudgetTooSmallError,
    Entered,
    Setting,
    System,
    app_cells,
    room_beside_cells,
)
from llmaas_eval.switching.systems.pipe import N_BUFFERS, Pipe, open_direct
from llmaas_plugins import _native
from llmaas_plugins._native import Codec, Status
from llmaas_plugins.kv_chunks.store.extents import page_round
from llmaas_plugins.kv_chunks.store.huge_pages import map_huge_pages

__all__ = ["QuantizedSwapping"]

_PIECE_TOKENS = 64
_WRITERS = 4
_SMALL_BYTES = 16 << 20


class QuantizedSwapping(System):
    """vLLM-SQ: the engine holds the context called last; memory holds 8-bit chunks.

    When a context is called, its chunks are decoded into the engine. Chunks leave memory when their
    space is needed. The context called longest ago loses chunks first, from its end. A chunk that
    leaves is written, unless the disk has it. New tokens are encoded as part of evaluating them, so
    encoding costs callers nothing here.
    """

    def __init__(self, setting: Setting) -> None:
        n_cells = app_cells(setting.max_tokens)
        self._engine = SequenceEngine(setting.model, n_cells, 1)
        super().__init__(setting, self._engine.geometry)
        self._chunk_tokens = int(setting.options.get("chunk_tokens", 16))
        self._geometry = self._engine.geometry
        bound = _native.chunk_bound(self._geometry, Codec.INT8, self._chunk_tokens)
        self._place_bytes = page_round(bound)
        self._piece_chunks = max(1, _PIECE_TOKENS // self._chunk_tokens)
        piece_tokens = self._piece_chunks * self._chunk_tokens
        buffer_bytes = page_round(self._engine.blob_bytes(piece_tokens))
        room = room_beside_cells(setting) - N_BUFFERS * buffer_bytes
        n_chunks = -(-setting.max_tokens // self._chunk_tokens)
        if room < n_chunks * self._place_bytes:
            self._engine.close()
            raise BudgetTooSmallError(
                f"{setting.budget} bytes leave {room} for chunks, too few for one context"
            )
        self._arena = map_huge_pages(room // self._place_bytes * self._place_bytes)
        self._free = list(range(room // self._place_bytes))
        self._pipe, self._writers = Pipe(buffer_bytes), ThreadPoolExecutor(_WRITERS)
        self._n_chunks = n_chunks
        n_bytes = setting.contexts * n_chunks * self._place_bytes
        self._file = open_direct(setting.folder / "swap", n_bytes)
        self._is_clean = np.zeros((setting.contexts, n_chunks), dtype=np.bool_)
        self._places: dict[int, list[int]] = {}
        """Places of each context's leading chunks; the context called longest ago is first."""
        self._n_tokens: dict[int, int] = {}
        self._windows: dict[int, int] = {}
        self._current = -1

    @property
    def n_cells(self) -> int:
        return self._engine.n_cells

    def enter(self, step: Step) -> Entered:
        context, n_tokens = step.context, len(step.before)
        places = self._places.pop(context, [])
        self._places[context] = places
        n_in_ram = len(places)
        self._make_room(context, self._count(step.n_most) - n_in_ram)
        if context == self._current:
            return Entered(n_resident=n_tokens)
        places += [self._free.pop() for _ in range(self._count(n_tokens) - n_in_ram)]
        self._engine.remove(0)
        self._current = context
        self._load(context, n_tokens, n_in_ram)
        n_ram = min(n_tokens, n_in_ram * self._chunk_tokens)
        return Entered(n_ram=n_ram, n_disk=n_tokens - n_ram)

    def background(self, step: Step, idle_s: float) -> None:
        """Encode the call's new tokens into space that ``enter`` reserved."""
        n_tokens = len(step.after)
        n_same = 0 if step.slides else len(step.before) // self._chunk_tokens
        places, n_chunks = self._places[step.context], self._count(n_tokens)
        while len(places) < n_chunks:
            places.append(self._free.pop())
        while len(places) > n_chunks:
            self._free.append(places.pop())
        self._is_clean[step.context, n_same:] = False
        self._n_tokens[step.context] = n_tokens
        self._windows[step.context] = step.window
        for first in range(n_same, n_chunks, self._piece_chunks):
            start = first * self._chunk_tokens
            end = min(start + self._piece_chunks * self._chunk_tokens, n_tokens)
            blob = self._pipe.buffer[: self._engine.blob_bytes(end - start)]
            self._engine.read(0, start, end, blob)
            _native.blob_check(self._geometry, blob, range(start, end))
            self._encode(step.context, first, blob, end - start)

    def cells(self, step: Step) -> NDArray[np.uint8]:
        n_tokens = len(step.after)
        blob = np.zeros(self._engine.blob_bytes(n_tokens), dtype=np.uint8)
        self._engine.read(0, 0, n_tokens, blob)
        return blob

    def close(self) -> None:
        self._pipe.close()
        self._writers.shutdown()
        os.close(self._file)
        self._engine.close()

    def _cut(self, context: int, n_tokens: int) -> None:
        self._engine.remove(0, n_tokens)

    def _append(self, context: int, blob: NDArray[np.uint8]) -> None:
        self._engine.put(0, blob)

    def _grown(self, step: Step) -> None:
        self._engine.finish()
        self._current = step.context

    # -- out ------------------------------------------------------------------------------------

    def _make_room(self, called: int, n_chunks: int) -> None:
        others = [(context, places) for context, places in self._places.items() if places]
        for context, places in others:
            n_wanted = n_chunks - len(self._free)
            if n_wanted <= 0:
                return
            if context != called:
                self._reclaim(context, places, min(n_wanted, len(places)))

    def _reclaim(self, context: int, places: list[int], n_chunks: int) -> None:
        n_kept = len(places) - n_chunks
        dirty = [i for i in range(n_kept, len(places)) if not self._is_clean[context, i]]
        step = -(-len(dirty) // _WRITERS) or 1
        parts = [dirty[i : i + step] for i in range(0, len(dirty), step)]
        list(self._writers.map(lambda part: self._write(context, places, part), parts))
        self._is_clean[context, n_kept : len(places)] = True
        self._free += places[n_kept:]
        del places[n_kept:]

    def _write(self, context: int, places: Sequence[int], chunks: Sequence[int]) -> None:
        _native.store_write(
            self._file,
            [self._offset(context, i) for i in chunks],
            [self._bytes(context, i) for i in chunks],
            [self._address(places[i]) for i in chunks],
        )

    def _encode(self, context: int, first: int, blob: NDArray[np.uint8], n_cells: int) -> None:
        for start in range(0, n_cells, self._chunk_tokens):
            chunk = first + start // self._chunk_tokens
            place = self._places[context][chunk] * self._place_bytes
            _native.chunk_encode(
                self._geometry,
                Codec.INT8,
                blob,
                n_cells,
                start,
                min(self._chunk_tokens, n_cells - start),
                self._key(context, chunk),
                self._arena[place : place + self._place_bytes],
            )

    # -- in -------------------------------------------------------------------------------------

    def _load(self, context: int, n_tokens: int, n_in_ram: int) -> None:
        """Decode all chunks into the engine; threads first read the chunks from ``n_in_ram`` on."""
        n_chunks, step = self._count(n_tokens), self._piece_chunks

        def fill(part: range, buffer: NDArray[np.uint8]) -> None:
            self._read(context, range(max(part.start, n_in_ram), part.stop))
            sizes = [self._bytes(context, i) for i in part]
            counts = [self._tokens(context, i) for i in part]
            addresses = [self._address(self._places[context][i]) for i in part]
            n_cells = sum(counts)
            firsts = list(accumulate(counts[:-1], initial=0))
            blob = buffer[: self._engine.blob_bytes(n_cells)]
            _native.chunks_decode_at(self._geometry, addresses, sizes, firsts, blob, n_cells)
            start = part.start * self._chunk_tokens
            _native.blob_init(self._geometry, blob, range(start, start + n_cells))

        def take(part: range, buffer: NDArray[np.uint8]) -> None:
            n_cells = sum(self._tokens(context, i) for i in part)
            self._engine.put(0, buffer[: self._engine.blob_bytes(n_cells)])

        parts = [range(i, min(i + step, n_chunks)) for i in range(0, n_chunks, step)]
        is_small = n_in_ram >= n_chunks and n_tokens * self.setting.token_bytes <= _SMALL_BYTES
        self._pipe.load(parts, fill, take, in_this_thread=is_small)
        self._engine.finish()

    def _read(self, context: int, chunks: range) -> None:
        if not chunks:
            return
        statuses = _native.store_read(
            self._file,
            [self._offset(context, i) for i in chunks],
            [self._bytes(context, i) for i in chunks],
            [self._address(self._places[context][i]) for i in chunks],
            [self._key(context, i) for i in chunks],
        )
        if any(status != Status.OK for status in statuses):
            raise OSError(f"chunks {chunks} of context {context} could not be read: {statuses}")

    # -- where ----------------------------------------------------------------------------------

    def _count(self, n_tokens: int) -> int:
        return -(-n_tokens // self._chunk_tokens)

    def _tokens(self, context: int, chunk: int) -> int:
        rest = self._n_tokens[context] - chunk * self._chunk_tokens
        return min(self._chunk_tokens, rest)

    def _bytes(self, context: int, chunk: int) -> int:
        return _native.chunk_bound(self._geometry, Codec.INT8, self._tokens(context, chunk))

    def _offset(self, context: int, chunk: int) -> int:
        return (context * self._n_chunks + chunk) * self._place_bytes

    def _address(self, place: int) -> int:
        return int(self._arena.ctypes.data) + place * self._place_bytes

    def _key(self, context: int, chunk: int) -> bytes:
        window = self._windows[context]
        return b"".join(n.to_bytes(8, "little") for n in (context, window, chunk, 0))
