"""Layout of the engine's KV cells, and of the sequence blob that stores them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ._ffi import ffi, lib
from .base import as_input, as_output, fail

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .base import Bytes

__all__ = [
    "KVGeometry",
    "blob_check",
    "blob_init",
    "blob_positions",
    "blob_probe",
    "blob_size",
    "blob_sort",
]

MAX_LAYERS = 1024
BLOB_HEAD_BYTES = 16


@dataclass(frozen=True)
class KVGeometry:
    """Shape of a context's KV cache, the same for all chunks of a model and context setting.

    Attributes:
        n_layer: Number of layers, 1 to 1024.
        v_trans: Whether the engine stores V transposed (no flash attention).
        type_k: ggml type id of the K rows (0 f32, 1 f16, 8 q8_0, 30 bf16, others opaque).
        type_v: ggml type id of the V rows.
        k_row: Bytes of one token's K row, per layer.
        v_row: Bytes of one token's V row, per layer; 0 where a layer has none.
        n_first: Layers in the first of two caches (sliding windows); 0 if there is only one cache.
    """

    n_layer: int
    v_trans: bool
    type_k: int
    type_v: int
    k_row: tuple[int, ...]
    v_row: tuple[int, ...]
    n_first: int = 0
    handle: Any = field(init=False, repr=False, compare=False)
    _rows: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Build the C struct once and let the core check it."""
        if not len(self.k_row) == len(self.v_row) == self.n_layer:
            raise fail(
                f"KV geometry of {self.n_layer} layers has {len(self.k_row)} K rows"
                f" and {len(self.v_row)} V rows",
                lib.LLMAAS_EINVAL,
            )
        try:
            rows = (ffi.new("uint64_t[]", self.k_row), ffi.new("uint64_t[]", self.v_row))
            handle = ffi.new(
                "llmaas_kv_geom *",
                (self.n_layer, int(self.v_trans), self.type_k, self.type_v, *rows, self.n_first),
            )
        except OverflowError as error:
            raise fail(f"KV geometry {self}: {error}", lib.LLMAAS_EINVAL) from error
        status = lib.llmaas_kv_geom_check(handle)
        if status:
            raise fail(
                f"KV geometry {self} (1..{MAX_LAYERS} layers; rows of 2 bytes to 1 MiB in whole"
                " blocks of their type; transposed V only with 2- or 4-byte elements)",
                status,
            )
        object.__setattr__(self, "_rows", rows)
        object.__setattr__(self, "handle", handle)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy by value, because the C struct belongs to this process."""
        return type(self), (
            self.n_layer, self.v_trans, self.type_k, self.type_v, self.k_row, self.v_row,
            self.n_first,
        )  # fmt: skip

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers, K and V."""
        return sum(self.k_row) + sum(self.v_row)

    @property
    def n_planes(self) -> int:
        """Number of K and V tensors over all layers."""
        return self.n_layer + sum(row > 0 for row in self.v_row)

    @property
    def hash(self) -> int:
        """64-bit geometry hash stored in chunks. It does not depend on the orientation of V."""
        return lib.llmaas_kv_geom_hash(self.handle)

    def to_json(self) -> dict[str, Any]:
        """Return the geometry as plain values for a manifest."""
        return {
            "n_layer": self.n_layer,
            "v_trans": self.v_trans,
            "type_k": self.type_k,
            "type_v": self.type_v,
            "k_row": list(self.k_row),
            "v_row": list(self.v_row),
            "n_first": self.n_first,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the geometry that :meth:`to_json` described.

        Raises:
            NativeError: The values do not describe a geometry.
        """
        try:
            return cls(
                n_layer=int(values["n_layer"]),
                v_trans=bool(values["v_trans"]),
                type_k=int(values["type_k"]),
                type_v=int(values["type_v"]),
                k_row=tuple(int(row) for row in values["k_row"]),
                v_row=tuple(int(row) for row in values["v_row"]),
                n_first=int(values.get("n_first", 0)),
            )
        except (KeyError, TypeError) as error:
            raise fail(f"KV geometry from {values!r}: {error!r}", lib.LLMAAS_EINVAL) from error


def blob_size(geom: KVGeometry, n_cells: int) -> int:
    """Return the bytes of an engine blob of ``n_cells`` cells."""
    size = lib.llmaas_blob_size(geom.handle, n_cells)
    if size == 0:
        raise fail(f"blob of {n_cells} cells, expected at least 1", lib.LLMAAS_EINVAL)
    return size


def blob_init(geom: KVGeometry, buf: Bytes, positions: Sequence[int]) -> None:
    """Write all headers of a blob of ``len(positions)`` cells; do not write the rows."""
    view, n = as_output(buf), len(positions)
    status = lib.llmaas_blob_init(geom.handle, view, len(view), _positions(positions), n)
    if status:
        raise fail(f"blob of {len(view)} bytes for {n} cells, {_expected(geom, n)}", status)


def blob_check(geom: KVGeometry, buf: Bytes, positions: Sequence[int]) -> None:
    """Raise unless the blob has exactly this layout and these positions."""
    view, n = as_input(buf), len(positions)
    status = lib.llmaas_blob_check(geom.handle, view, len(view), _positions(positions), n)
    if status:
        raise fail(f"engine blob of {len(view)} bytes for {n} cells, {_expected(geom, n)}", status)


def blob_sort(geom: KVGeometry, buf: Bytes, n_cells: int) -> None:
    """Sort the cells of an engine blob by position, in place."""
    view = as_output(buf)
    status = lib.llmaas_blob_sort(geom.handle, view, len(view), n_cells)
    if status:
        raise fail(
            f"engine blob of {len(view)} bytes for {n_cells} cells, {_expected(geom, n_cells)}",
            status,
        )


def blob_positions(buf: Bytes) -> list[int]:
    """Return the positions of an engine blob's cells, in blob order."""
    view = as_input(buf)
    n = 0
    if len(view) >= BLOB_HEAD_BYTES:
        n = min(int.from_bytes(ffi.unpack(view + 12, 4), "little"), len(view) // 12)
    pos = ffi.new("int32_t[]", n)
    status = lib.llmaas_blob_positions(view, len(view), pos, n)
    if status:
        raise fail(f"positions of an engine blob of {len(view)} bytes", status)
    return list(pos)


def blob_probe(buf: Bytes) -> tuple[KVGeometry, int]:
    """Read the geometry and the number of cells from an untrusted engine blob."""
    view = as_input(buf)
    info = ffi.new("llmaas_blob_info *")
    k_row, v_row = ffi.new(f"uint64_t[{MAX_LAYERS}]"), ffi.new(f"uint64_t[{MAX_LAYERS}]")
    status = lib.llmaas_blob_probe(view, len(view), MAX_LAYERS, info, k_row, v_row)
    if status:
        raise fail(f"engine blob of {len(view)} bytes", status)
    geom = KVGeometry(
        n_layer=info.n_layer,
        v_trans=bool(info.v_trans),
        type_k=info.type_k,
        type_v=info.type_v,
        k_row=tuple(ffi.unpack(k_row, info.n_layer)),
        v_row=tuple(ffi.unpack(v_row, info.n_layer)),
        n_first=info.n_first,
    )
    return geom, info.n_cells


def _positions(positions: Sequence[int]) -> Any:
    if isinstance(positions, range):
        values = np.arange(positions.start, positions.stop, positions.step, dtype=np.int32)
    else:
        values = np.array(positions, dtype=np.int32)
    return ffi.from_buffer("int32_t[]", values)  # type: ignore[arg-type]  # an ndarray is one


def _expected(geom: KVGeometry, n_cells: int) -> str:
    size = lib.llmaas_blob_size(geom.handle, n_cells)
    return f"expected {size} bytes" if size else "expected at least 1 cell"
