"""Low-rank terms that are added to products, stored in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

__all__ = ["BLOCK", "MAX_RANK", "LowRank", "blocks_dtype"]

BLOCK = 32
"""Values of a row that share a scale."""
MAX_RANK = 64

_MOST = 127


def blocks_dtype(rank: int) -> np.dtype[Any]:
    """Return the type of a block: a scale and 32 integers for each of ``rank`` rows."""
    return np.dtype([("scales", "<f2", (rank,)), ("values", "i1", (rank, BLOCK))])


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """Term of a product at one level: ``y[:n_rows] += B @ (A @ x[:n_columns])``.

    A and the transpose of B have ``rank`` rows each. They are stored in blocks of 32 columns; a
    value is its integer times the scale of its row in its block. Integers beyond the last column
    are 0.

    Attributes:
        rank: Rows of A and columns of B, 1 to ``MAX_RANK``.
        n_columns: Columns of A.
        n_rows: Rows of B.
        a: A; ``blocks_dtype(rank)``, ``(n_columns / 32 rounded up,)``.
        b: Transpose of B; ``blocks_dtype(rank)``, ``(n_rows / 32 rounded up,)``.
    """

    rank: int
    n_columns: int
    n_rows: int
    a: NDArray[Any]
    b: NDArray[Any]

    @classmethod
    def of(cls, a: NDArray[np.float32], b: NDArray[np.float32]) -> Self:
        """Quantize A, ``(rank, n_columns)``, and B, ``(n_rows, rank)``.

        Raises:
            ValueError: The shapes do not match, a value is not finite, or a value is too large.
        """
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or 0 in a.shape + b.shape:
            raise ValueError(f"A has the shape {a.shape} and B {b.shape}")
        rank = a.shape[0]
        if rank > MAX_RANK:
            raise ValueError(f"its rank is {rank}, expected at most {MAX_RANK}")
        a, b = _balanced(a.astype(np.float32), b.T.astype(np.float32))
        return cls(rank, a.shape[1], b.shape[1], _packed(a), _packed(b))

    @property
    def n_bytes(self) -> int:
        """Bytes of both matrices."""
        return int(self.a.nbytes + self.b.nbytes)

    def is_sound(self) -> bool:
        """Return whether both arrays have the type and the size that the numbers say."""
        return (
            0 < self.rank <= MAX_RANK
            and _are_blocks(self.a, self.rank, self.n_columns)
            and _are_blocks(self.b, self.rank, self.n_rows)
        )

    def floats(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return A, ``(rank, n_columns)``, and B, ``(n_rows, rank)``, as they are stored."""
        return _unpacked(self.a)[:, : self.n_columns], _unpacked(self.b)[:, : self.n_rows].T


def _balanced(
    a: NDArray[np.float32], b: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Scale each pair of rows to the same largest value, because float16 has few small scales."""
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ValueError("it has values that are not finite")
    most_a, most_b = np.abs(a).max(axis=1, keepdims=True), np.abs(b).max(axis=1, keepdims=True)
    is_used = (most_a > 0) & (most_b > 0)
    ratio = np.sqrt(np.where(is_used, most_b, 1)) / np.sqrt(np.where(is_used, most_a, 1))
    return np.where(is_used, a * ratio, 0), np.where(is_used, b / ratio, 0)


def _are_blocks(blocks: NDArray[Any], rank: int, n: int) -> bool:
    is_whole = n > 0 and blocks.shape == (-(-n // BLOCK),) and blocks.dtype == blocks_dtype(rank)
    return is_whole and blocks.flags.c_contiguous


def _packed(matrix: NDArray[np.float32]) -> NDArray[Any]:
    rank, n = matrix.shape
    blocks = np.zeros(-(-n // BLOCK), blocks_dtype(rank))
    padded = np.zeros((rank, blocks.size * BLOCK), np.float32)
    padded[:, :n] = matrix
    values = padded.reshape(rank, -1, BLOCK).transpose(1, 0, 2)
    most = np.abs(values).max(axis=2) / _MOST
    if most.max() > np.finfo(np.float16).max:
        raise ValueError("its values are too large for 8 bits with float16 scales")
    blocks["scales"] = most
    scales = blocks["scales"].astype(np.float32)[..., None]
    scaled = np.divide(values, scales, out=np.zeros_like(values), where=scales > 0)
    blocks["values"] = np.rint(scaled).clip(-_MOST, _MOST)
    return blocks


def _unpacked(blocks: NDArray[Any]) -> NDArray[np.float32]:
    values = blocks["values"] * blocks["scales"].astype(np.float32)[..., None]
    unpacked: NDArray[np.float32] = values.transpose(1, 0, 2).reshape(values.shape[1], -1)
    return unpacked
