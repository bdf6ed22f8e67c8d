"""Synthetic cells in place of evaluated ones: realistic values, equal for equal tokens."""

from __future__ import annotations

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quantize
from numpy.typing import NDArray

from llmaas_plugins import _native
from llmaas_plugins._native import KVGeometry

__all__ = ["PIECE_TOKENS", "SyntheticCells", "rows_of"]

PIECE_TOKENS = 128
_POOL_TOKENS = 512
_STRIDE = 61
_KINDS = (GGMLQuantizationType.F16, GGMLQuantizationType.Q8_0)
_HEAD_BYTES = 12  # header of each layer's K or V in a blob: type and bytes of a row


class SyntheticCells:
    """A pool of rows, from which the cells of any context are cut.

    Attributes:
        geometry: Layout of the engine's cells: f16 or q8_0, with V not transposed.
    """

    def __init__(self, geometry: KVGeometry) -> None:
        """Draw the pool.

        Each channel of the keys gets a scale and a mean of its own, some far from 0; values get
        neither.
        """
        kind = GGMLQuantizationType(geometry.type_k)
        if geometry.v_trans or geometry.type_v != kind or kind not in _KINDS:
            raise ValueError(
                f"found cells of {geometry}, expected f16 or q8_0 with flash attention on"
            )
        self.geometry = geometry
        rng, (n_values, n_bytes) = np.random.default_rng(0), GGML_QUANT_SIZES[kind]
        widths = [row // n_bytes * n_values for row in (*geometry.k_row, *geometry.v_row) if row]
        drawn = [_draw(rng, n, channels=i < geometry.n_layer) for i, n in enumerate(widths)]
        self._pool = [_looped(quantize(rows, kind)) for rows in drawn]
        self._blob = np.zeros(_native.blob_size(geometry, PIECE_TOKENS), dtype=np.uint8)

    def blob(self, context: int, window: int, start: int, n_tokens: int) -> NDArray[np.uint8]:
        """Return cells at positions ``start`` to ``start + n_tokens``; valid until the next call.

        Args:
            context: Number of the context.
            window: How often the context's window has slid.
            start: First position.
            n_tokens: Number of cells, at most ``PIECE_TOKENS``.
        """
        blob = self._blob[: _native.blob_size(self.geometry, n_tokens)]
        first = (_STRIDE * context + 7 * window + start) % _POOL_TOKENS
        for rows, pool in zip(rows_of(self.geometry, blob, n_tokens), self._pool, strict=True):
            rows[:] = pool[first : first + n_tokens]
        _native.blob_init(self.geometry, blob, range(start, start + n_tokens))
        return blob


def rows_of(geometry: KVGeometry, blob: NDArray[np.uint8], n_cells: int) -> list[NDArray[np.uint8]]:
    """Return views of a blob's rows: K of each layer, then V, of shape ``(n_cells, row bytes)``."""
    found: list[NDArray[np.uint8]] = []
    end = blob.nbytes
    for row in reversed([*geometry.k_row, *(row for row in geometry.v_row if row)]):
        start = end - n_cells * row
        found.append(blob[start:end].reshape(n_cells, row))
        end = start - _HEAD_BYTES
    return found[::-1]


def _draw(rng: np.random.Generator, n_channels: int, *, channels: bool) -> NDArray[np.float32]:
    values = rng.standard_normal((_POOL_TOKENS, n_channels), dtype=np.float32)
    if not channels:
        return values
    scale = np.exp(0.7 * rng.standard_normal(n_channels, dtype=np.float32))
    mean = 2 * rng.standard_normal(n_channels, dtype=np.float32)
    mean[rng.random(n_channels) < 0.03] *= 6
    return values * scale + mean


def _looped(rows: NDArray[np.generic]) -> NDArray[np.uint8]:
    """Return the rows as bytes, with the beginning repeated at the end."""
    return np.concatenate([rows, rows[:PIECE_TOKENS]]).view(np.uint8)
