"""Offsets of the arrays in a selected datastore's file, computed from a few counts."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from llmaas_plugins._native import KNN_ALIGN, KNN_MAX_DIMS, knn_stride

__all__ = ["PAGE", "ArrayCounts", "whole_pages"]

PAGE = 4096
"""Bytes of the header; every array begins at a multiple of this."""

_MAX_ROWS = 2**31 - 1
_MAX_TEXT = 1 << 28


class ArrayCounts(NamedTuple):
    """Counts that determine the sizes of all arrays.

    Attributes:
        n_embd: Numbers in a key.
        n_dims: Numbers in a key's code; fewer than in a key if there is a basis.
        n_front: Bytes in the first of a code's two parts.
        n_axes: Directions of the basis: ``n_dims``, or 0 without a basis.
        n_rows: Number of pairs.
        n_text: Bytes of JSON.
    """

    n_embd: int
    n_dims: int
    n_front: int
    n_axes: int
    n_rows: int
    n_text: int

    def are_possible(self) -> bool:
        """Return whether a writer could have made a datastore with these counts."""
        return (
            0 < self.n_dims <= self.n_embd <= KNN_MAX_DIMS
            and 0 < self.n_front <= knn_stride(self.n_dims)
            and self.n_front % KNN_ALIGN == 0
            and (self.n_axes == self.n_dims or (self.n_axes == 0 and self.n_dims == self.n_embd))
            and self.n_rows <= _MAX_ROWS
            and self.n_text <= _MAX_TEXT
        )

    def arrays(self) -> dict[str, tuple[type[np.generic], tuple[int, ...]]]:
        """Return type and shape of each array, in the file's order; the keys come after them."""
        n, mean = self.n_rows, self.n_embd if self.n_axes else 0
        n_rest = knn_stride(self.n_dims) - self.n_front
        return {
            "text": (np.uint8, (self.n_text,)),
            "values": (np.int32, (n,)),
            "origins": (np.int32, (n, 2)),
            "weights": (np.float32, (n,)),
            "mean": (np.float32, (mean,)),
            "axes": (np.float32, (self.n_axes, mean)),
            "center": (np.float32, (self.n_dims,)),
            "steps": (np.float32, (self.n_dims,)),
            "scales": (np.float32, (n,)),
            "norms": (np.float32, (n,)),
            "sums": (np.uint32, (n,)),
            "front_norms": (np.float32, (n if n_rest else 0,)),
            "front": (np.uint8, (n, self.n_front)),
            "rest": (np.uint8, (n, n_rest)),
        }

    def places(self) -> dict[str, int]:
        """Return the offset of each array, of the keys, and of the file's end."""
        places, at = {}, PAGE
        for name, (dtype, shape) in self.arrays().items():
            places[name] = at
            at = whole_pages(at + np.dtype(dtype).itemsize * math.prod(shape))
        return places | {"keys": at, "end": at + 2 * self.n_rows * self.n_embd}


def whole_pages(n_bytes: int) -> int:
    """Round up to a multiple of the page size."""
    return -(-n_bytes // PAGE) * PAGE
