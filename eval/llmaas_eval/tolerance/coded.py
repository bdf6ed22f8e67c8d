"""Cells of a context after the real codec, with any number of bits for each chunk and layer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.tolerance.texts import CHUNK
from llmaas_plugins._native import (
    Codec,
    blob_probe,
    chunk_bound,
    chunk_cut,
    chunk_encode,
    chunks_decode,
)

__all__ = ["MAX_BITS", "Bits", "Coded"]

MAX_BITS = 8
_KEY = bytes(32)

Bits = NDArray[np.int64]
"""Bits of each chunk, shape ``(n_chunks,)``; or by layer and chunk, ``(n_layer, n_chunks)``."""


class Coded:
    """A context of whole chunks, encoded once; fewer bits are prefixes of the payloads.

    Attributes:
        n_chunks: Number of chunks.
        n_layer: Number of layers.
        raw_bytes: Bytes of the cells' rows before encoding.
    """

    def __init__(self, blob: NDArray[np.uint8]) -> None:
        """Encode the blob that the engine wrote."""
        self._blob = blob
        self._geometry, self._n_cells = blob_probe(blob)
        self.n_chunks, self.n_layer = self._n_cells // CHUNK, self._geometry.n_layer
        self.raw_bytes = self._n_cells * self._geometry.token_bytes
        self._payloads = self._encode(Codec.PLANES)
        self._decoded: dict[int, NDArray[np.uint8]] = {}

    def restored(self, bits: Bits) -> NDArray[np.uint8]:
        """Return the blob that the engine gets when chunks with these bits are restored."""
        bits = np.broadcast_to(bits, (self.n_layer, self.n_chunks))
        found = self._blob.copy()
        for some in np.unique(bits):
            is_some = np.tile(bits == some, (2, 1))  # keys of all layers, then values
            rows = zip(self._rows(found), self._rows(self._at(int(some))), is_some, strict=True)
            for into, source, chosen in rows:
                into[chosen] = source[chosen]
        return found

    def n_bytes(self, bits: Bits) -> int:
        """Return the bytes of the chunks, headers and scales included.

        Each layer counts as an equal share of a chunk's bytes.
        """
        bits = np.broadcast_to(bits, (self.n_layer, self.n_chunks))
        sizes = [[chunk_cut(p, b + 1) for b in range(MAX_BITS)] for p in self._payloads]
        return round(np.array(sizes)[np.arange(self.n_chunks), bits - 1].sum() / self.n_layer)

    def int8(self) -> tuple[NDArray[np.uint8], int]:
        """Return the blob after the static 8-bit codec, and the encoded bytes."""
        payloads = self._encode(Codec.INT8)
        return self._decode(payloads), sum(map(len, payloads))

    def _encode(self, codec: Codec) -> list[bytes]:
        room = bytearray(chunk_bound(self._geometry, codec, CHUNK))
        payloads = []
        for first in range(0, self._n_cells, CHUNK):
            n_written = chunk_encode(
                self._geometry, codec, self._blob, self._n_cells, first, CHUNK, _KEY, room
            )
            payloads.append(bytes(room[:n_written]))
        return payloads

    def _at(self, bits: int) -> NDArray[np.uint8]:
        if bits not in self._decoded:
            self._decoded[bits] = self._decode([p[: chunk_cut(p, bits)] for p in self._payloads])
        return self._decoded[bits]

    def _decode(self, payloads: list[bytes]) -> NDArray[np.uint8]:
        blob = self._blob.copy()
        chunks_decode(self._geometry, payloads, range(0, self._n_cells, CHUNK), blob, self._n_cells)
        return blob

    def _rows(self, blob: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
        """Return views of each layer's keys, then values; shape ``(n_chunks, bytes)``."""
        start, views = _head_bytes(self._n_cells), []
        for row in (*self._geometry.k_row, *self._geometry.v_row):
            start += _LAYER_BYTES
            size = self._n_cells * row
            views.append(blob[start : start + size].reshape(self.n_chunks, CHUNK * row))
            start += size
        if start != len(blob):
            raise ValueError(
                f"found a blob of {len(blob)} bytes, expected {start}: {self._geometry}"
            )
        return views


_LAYER_BYTES = 12
"""Bytes of the type and the row size before each layer's rows."""


def _head_bytes(n_cells: int) -> int:
    return 16 + 12 * n_cells + 8
