"""vLLM-S: chunks of 16 tokens, swapped out when their cells are needed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from llama_cpp import llama_cpp
from numpy.typing import NDArray

from llmaas_eval.switching.steps import Step
from llmaas_eval.switching.synthetic import rows_of
from llmaas_eval.switching.systems.base import Setting
from llmaas_eval.switching.systems.in_cells import HEAD_BYTES, InCells
from llmaas_eval.switching.systems.pipe import N_BUFFERS, Pipe, open_direct
from llmaas_plugins import _native
from llmaas_plugins._native import Codec, Status
from llmaas_plugins.kv_chunks.store.extents import page_round

__all__ = ["PagedSwapping", "QuantizedCells"]

_PART_TOKENS = 64
"""Tokens that move at a time, unless a chunk is larger."""

_F16_BYTES = 2

_Part = Sequence[int]
"""Neighboring chunks of one context."""


class PagedSwapping(InCells):
    """vLLM-S: the last chunks of the context called longest ago are swapped out first.

    Chunks that the disk already has are not written again.
    """

    def __init__(self, setting: Setting) -> None:
        self._chunk_tokens = int(setting.options.get("chunk_tokens", 16))
        self._place_bytes = page_round(self._chunk_tokens * setting.token_bytes + HEAD_BYTES)
        self._per_part = max(1, _PART_TOKENS // self._chunk_tokens)
        self._blob_room = self._per_part * self._place_bytes
        super().__init__(setting, N_BUFFERS * 2 * self._blob_room)
        self._geometry = self._engine.geometry
        self._pipe = Pipe(2 * self._blob_room)
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
            start, counts = self._extent(part, n_tokens)
            self._engine.read(context, start, start + sum(counts), buffer[self._blob_room :])

        def empty(part: _Part, buffer: NDArray[np.uint8]) -> None:
            start, counts = self._extent(part, n_tokens)
            n_cells = sum(counts)
            blob = buffer[self._blob_room :][: self._engine.blob_bytes(n_cells)]
            self._sort(blob, start, n_cells)
            for i, first in enumerate(accumulate(counts[:-1], initial=0)):
                place = buffer[i * self._place_bytes : (i + 1) * self._place_bytes]
                key = self._key(context, part[i])
                _native.chunk_encode(
                    self._geometry, Codec.RAW, blob, n_cells, first, counts[i], key, place
                )
            offsets, sizes, addresses = self._places(context, part, counts, buffer)
            _native.store_write(self._file, offsets, sizes, addresses)

        self._pipe.store(self._parts(chunks), give, empty)

    def _load(self, step: Step, n_resident: int) -> int:
        n_tokens, context = len(step.before), step.context
        chunks = range(n_resident // self._chunk_tokens, -(-n_tokens // self._chunk_tokens))

        def fill(part: _Part, buffer: NDArray[np.uint8]) -> None:
            start, counts = self._extent(part, n_tokens)
            offsets, sizes, addresses = self._places(context, part, counts, buffer)
            keys = [self._key(context, chunk) for chunk in part]
            statuses = _native.store_read(self._file, offsets, sizes, addresses, keys)
            if any(status != Status.OK for status in statuses):
                raise OSError(f"chunks {part} of context {context} could not be read: {statuses}")
            n_cells = sum(counts)
            blob = buffer[self._blob_room :][: self._engine.blob_bytes(n_cells)]
            firsts = list(accumulate(counts[:-1], initial=0))
            _native.chunks_decode_at(self._geometry, addresses, sizes, firsts, blob, n_cells)
            _native.blob_init(self._geometry, blob, range(start, start + n_cells))

        def take(part: _Part, buffer: NDArray[np.uint8]) -> None:
            n_cells = sum(self._extent(part, n_tokens)[1])
            blob = buffer[self._blob_room :][: self._engine.blob_bytes(n_cells)]
            self._engine.put(context, blob)

        if n_resident == n_tokens:
            return 0
        self._pipe.load(self._parts(chunks), fill, take)
        self._engine.finish()
        return n_tokens - n_resident

    def _sort(self, blob: NDArray[np.uint8], start: int, n_cells: int) -> None:
        """Order a blob by position: the engine returns cells in their order in the cache."""
        positions = np.array(_native.blob_positions(blob))
        order = np.argsort(positions)
        if positions[order].tolist() != list(range(start, start + n_cells)):
            raise RuntimeError(f"found cells at {positions}, expected {n_cells} from {start} on")
        if (np.diff(order) != 1).any():
            for rows in rows_of(self._geometry, blob, n_cells):
                rows[:] = rows[order]

    # -- where ----------------------------------------------------------------------------------

    def _parts(self, chunks: range | list[int]) -> list[_Part]:
        runs = np.split(np.array(chunks, dtype=int), np.flatnonzero(np.diff(chunks) != 1) + 1)
        step = self._per_part
        return [run[i : i + step].tolist() for run in runs for i in range(0, len(run), step)]

    def _extent(self, part: _Part, n_tokens: int) -> tuple[int, list[int]]:
        """Return the first position of ``part`` and the token count of each of its chunks.

        The context has ``n_tokens`` tokens, so its last chunk may be shorter.
        """
        starts = [chunk * self._chunk_tokens for chunk in part]
        return starts[0], [min(self._chunk_tokens, n_tokens - start) for start in starts]

    def _places(
        self, context: int, part: _Part, counts: Sequence[int], buffer: NDArray[np.uint8]
    ) -> tuple[list[int], list[int], list[int]]:
        """Return the chunks' offsets in the file, and the sizes and addresses of their payloads."""
        first, address = context * self._n_chunks, int(buffer.ctypes.data)
        return (
            [(first + chunk) * self._place_bytes for chunk in part],
            [_native.chunk_bound(self._geometry, Codec.RAW, n) for n in counts],
            [address + i * self._place_bytes for i in range(len(part))],
        )

    def _key(self, context: int, chunk: int) -> bytes:
        return b"".join(n.to_bytes(16, "little") for n in (context, chunk))


class QuantizedCells(PagedSwapping):
    """vLLM-S with llama.cpp's 8-bit cells: the engine computes with the quantized cache itself."""

    cell_type = llama_cpp.GGML_TYPE_Q8_0

    def __init__(self, setting: Setting) -> None:
        n_values, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType.Q8_0]
        token_bytes = setting.token_bytes // _F16_BYTES // n_values * n_bytes
        super().__init__(replace(setting, token_bytes=token_bytes))
