"""Rows of random weights in ggml's quantized types, drawn from a stock of blocks.

Quantizing 8 billion weights takes minutes. So ggml quantizes one stock of normally distributed
blocks of each type, and each row takes blocks of it at random. A row's scale is multiplied into the
blocks' own scales. Two rows share a block at the same place once in thousands of blocks.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from pathlib import Path

import llama_cpp
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

__all__ = ["Stock"]

_N_VALUES = 1 << 22
"""Values of a stock: 16,384 blocks of 256 or, at most, ``_MOST_BLOCKS``."""
_MOST_BLOCKS = 1 << 16

_SCALES_AT: Mapping[GGMLQuantizationType, tuple[int, ...]] = {
    GGMLQuantizationType.Q4_0: (0,),
    GGMLQuantizationType.Q5_0: (0,),
    GGMLQuantizationType.Q8_0: (0,),
    GGMLQuantizationType.Q5_1: (0, 2),
    GGMLQuantizationType.Q4_K: (0, 2),
    GGMLQuantizationType.Q5_K: (0, 2),
    GGMLQuantizationType.Q6_K: (208,),
}
"""Offsets of the F16 numbers of a block to which its values are proportional."""


class Stock:
    """Blocks of one type, with values of variance 1."""

    def __init__(self, type_: GGMLQuantizationType, rng: np.random.Generator) -> None:
        """Draw and quantize the blocks; this takes up to two seconds."""
        self._rng, self._scales_at = rng, _SCALES_AT[type_]
        self._n_columns, n_bytes = GGML_QUANT_SIZES[type_]
        n = min(_N_VALUES // self._n_columns, _MOST_BLOCKS)
        values = rng.standard_normal((n, self._n_columns), dtype=np.float32)
        self._blocks = np.empty(n, f"V{n_bytes}")
        _ggml().ggml_quantize_chunk(
            int(type_), values.ctypes, self._blocks.ctypes, 0, n, self._n_columns, None
        )

    def rows(self, scales: NDArray[np.float32], n_columns: int) -> NDArray[np.uint8]:
        """Return random rows as bytes.

        Args:
            scales: Standard deviation of each row's values.
            n_columns: Values of a row.
        """
        size = len(scales), n_columns // self._n_columns
        picks = self._rng.integers(0, len(self._blocks), size, np.uint16)
        blocks = self._blocks.take(picks)
        for at in self._scales_at:
            field = blocks.view(_scale_at(at, blocks.itemsize))["scale"]
            field[...] = field.astype(np.float32) * scales[:, None]
        return blocks.view(np.uint8)


def _scale_at(at: int, n_bytes: int) -> np.dtype[np.void]:
    return np.dtype({"names": ["scale"], "formats": ["<f2"], "offsets": [at], "itemsize": n_bytes})


@functools.cache
def _ggml() -> ctypes.CDLL:
    """Load ggml, with the signature of its quantizer."""
    libraries = Path(llama_cpp.__file__).parent / "lib"
    library = ctypes.CDLL(next(str(path) for path in libraries.glob("libggml-base.so*")))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
        ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,
    ]  # fmt: skip
    return library
