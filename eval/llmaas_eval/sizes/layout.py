"""Headers of GGUF files that are written tensor by tensor."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from llmaas_plugins.model.gguf_entries import tensor_entry

__all__ = ["PlannedTensor", "header_bytes", "padding"]

_ALIGNMENT, _VERSION = 32, 3
_START = struct.Struct("<4sIQQ")


class PlannedTensor(NamedTuple):
    """A tensor of a file that is being written.

    Attributes:
        name: Name of the tensor.
        type: Type of its values.
        shape: Shape in GGUF's order, columns first.
    """

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        n_columns, n_bytes = GGML_QUANT_SIZES[self.type]
        return self.shape[0] // n_columns * n_bytes

    @property
    def n_rows(self) -> int:
        """Number of rows; 1 for a vector."""
        return math.prod(self.shape[1:])

    @property
    def n_bytes(self) -> int:
        """Size of the tensor."""
        return self.n_rows * self.row_bytes


def padding(n_bytes: int) -> bytes:
    """Return the bytes between a tensor of this size and the next."""
    return bytes(-n_bytes % _ALIGNMENT)


def header_bytes(entries: Sequence[bytes], tensors: Iterable[PlannedTensor]) -> bytes:
    """Return all bytes before the first tensor's.

    Args:
        entries: Entries of the metadata.
        tensors: Tensors in the order of the file.
    """
    infos, at = list[bytes](), 0
    for tensor in tensors:
        infos.append(tensor_entry(tensor.name, tensor.type, tensor.shape, at))
        at += tensor.n_bytes + len(padding(tensor.n_bytes))
    start = _START.pack(b"GGUF", _VERSION, len(infos), len(entries))
    whole = b"".join([start, *entries, *infos])
    return whole + padding(len(whole))
