"""Chunk payloads: encode from a blob, verify, decode into a blob."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from ._ffi import ffi, lib
from .base import as_array, as_input, as_key, as_output, fail

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from .base import Bytes
    from .kv import KVGeometry

__all__ = [
    "CHUNK_BITS",
    "ChunkInfo",
    "Codec",
    "chunk_bound",
    "chunk_cut",
    "chunk_encode",
    "chunk_peek",
    "chunk_verify",
    "chunks_decode",
    "chunks_decode_at",
    "chunks_land_at",
    "landings_fit",
]


CHUNK_BITS: int = lib.LLMAAS_CHUNK_BITS
"""Most bits per value in a ``PLANES`` payload."""


class Codec(IntEnum):
    """Encoding of a chunk's rows; the number is part of the file format."""

    RAW = 0
    LOSSLESS = 1
    INT8 = 2
    PLANES = 3


class ChunkInfo(NamedTuple):
    """Header of a chunk. ``bits`` is the number of planes of a ``PLANES`` payload, else 0."""

    codec: Codec
    n_tokens: int
    n_layer: int
    type_k: int
    type_v: int
    geom_hash: int
    body_bytes: int
    bits: int


def chunk_bound(geom: KVGeometry, codec: Codec, n_tokens: int, bits: int = 8) -> int:
    """Return the largest payload size of ``n_tokens`` tokens; exact for RAW, INT8 and PLANES.

    Args:
        geom: Geometry of the engine.
        codec: Codec of the payload.
        n_tokens: Number of tokens in the payload.
        bits: Planes to keep, for PLANES.
    """
    bound = lib.llmaas_chunk_bound(geom.handle, codec, bits, n_tokens)
    if bound == 0:
        raise fail(
            f"chunk of {n_tokens} tokens with codec {codec!r} and {bits} bits, expected"
            f" 1..{lib.LLMAAS_CHUNK_MAX_TOKENS} tokens and 1..{lib.LLMAAS_CHUNK_BITS} bits",
            lib.LLMAAS_EINVAL,
        )
    return bound


def chunk_encode(  # noqa: PLR0913, PLR0917 -- the C call's arguments
    geom: KVGeometry,
    codec: Codec,
    blob: Bytes,
    n_cells: int,
    first: int,
    n_tokens: int,
    key: Bytes,
    out: Bytes,
    bits: int = 8,
) -> int:
    """Encode cells ``first`` to ``first + n_tokens - 1`` of a checked blob; return bytes written.

    Raises:
        NativeError: EUNSUPPORTED if INT8 meets a value that is not finite, or PLANES a value beyond
            32768 (use LOSSLESS). ESPACE if ``out`` is shorter than :func:`chunk_bound`.
    """
    src, dst, written = as_input(blob), as_output(out), ffi.new("size_t *")
    status = lib.llmaas_chunk_encode(
        geom.handle, codec, bits, src, len(src), n_cells, first, n_tokens,
        as_key(key), dst, len(dst), written,
    )  # fmt: skip
    if status:
        raise fail(
            f"encode of cells {first}..{first + n_tokens - 1} of {n_cells} as"
            f" {Codec(codec).name} into {len(dst)} bytes",
            status,
        )
    return int(written[0])


def chunk_peek(payload: Bytes) -> ChunkInfo:
    """Read a header without the body; raise if the payload is truncated or foreign."""
    view, info = as_input(payload), ffi.new("llmaas_chunk_info *")
    status = lib.llmaas_chunk_peek(view, len(view), info)
    if status:
        raise fail(f"chunk of {len(view)} bytes", status)
    return ChunkInfo(
        Codec(info.codec), info.n_tokens, info.n_layer, info.type_k, info.type_v,
        info.geom_hash, info.body_bytes, info.bits,
    )  # fmt: skip


def chunk_cut(payload: Bytes, bits: int) -> int:
    """Return how many leading bytes of a payload are the same chunk with at most ``bits`` bits.

    These bytes are a complete payload. Only a ``PLANES`` payload with more bits can be shortened;
    for all others the result is the payload's size.
    """
    view, size = as_input(payload), ffi.new("size_t *")
    status = lib.llmaas_chunk_cut(view, len(view), bits, size)
    if status:
        raise fail(f"chunk of {len(view)} bytes cut to {bits} bits", status)
    return int(size[0])


def chunk_verify(payload: Bytes, key: Bytes) -> None:
    """Raise unless the payload is intact (ECORRUPT) and was written under this key (ESTALE)."""
    view = as_input(payload)
    status = lib.llmaas_chunk_verify(view, len(view), as_key(key))
    if status:
        raise fail(f"chunk of {len(view)} bytes", status)


def chunks_decode(
    geom: KVGeometry,
    payloads: Sequence[Bytes],
    firsts: Sequence[int],
    blob: Bytes,
    n_cells: int,
) -> int:
    """Decode payloads into a blob; payload ``i`` fills the cells from ``firsts[i]`` on.

    The CRC is not checked: call :func:`chunk_verify` (or ``store_read``) before.

    Returns:
        The number of payloads, all of them in place.

    Raises:
        NativeError: A payload is damaged or of another geometry. The first ``n_done`` payloads are
            in place, so ``payloads[n_done]`` is the faulty one.
    """
    views = [as_input(payload) for payload in payloads]
    sizes = [len(view) for view in views]
    table = ffi.new("uint8_t *[]", views)
    return _decode(lib.llmaas_chunks_decode, geom, table, sizes, firsts, as_output(blob), n_cells)


def chunks_decode_at(  # noqa: PLR0913, PLR0917 -- the C call's arguments
    geom: KVGeometry,
    addresses: Sequence[int],
    sizes: Sequence[int],
    firsts: Sequence[int],
    blob: Bytes,
    n_cells: int,
) -> int:
    """Decode like :func:`chunks_decode`, from addresses that the caller keeps alive."""
    decode = lib.llmaas_chunks_decode
    return _decode_at(decode, geom, addresses, sizes, firsts, as_output(blob), n_cells)


def chunks_land_at(  # noqa: PLR0913, PLR0917 -- the C call's arguments
    geom: KVGeometry,
    addresses: Sequence[int],
    sizes: Sequence[int],
    firsts: Sequence[int],
    landings: NDArray[np.uint64],
    n_cells: int,
) -> int:
    """Decode like :func:`chunks_decode_at`, but directly into the engine's memory.

    Args:
        geom: Geometry of the engine.
        addresses: Addresses of the payloads.
        sizes: Bytes of the payloads.
        firsts: First cell of each payload.
        landings: Destinations, shape ``(n_planes, 4)``, accepted by :func:`landings_fit`.
        n_cells: Number of cells of the destinations.
    """
    land = lib.llmaas_chunks_land
    return _decode_at(land, geom, addresses, sizes, firsts, _landings(landings), n_cells)


def landings_fit(geom: KVGeometry, landings: NDArray[np.uint64], n_cells: int) -> bool:
    """Return whether the landings cover everything that a blob of ``n_cells`` cells holds."""
    places = _landings(landings)
    return bool(lib.llmaas_landings_fit(geom.handle, places, len(places), n_cells))


def _landings(landings: NDArray[np.uint64]) -> Any:
    return ffi.from_buffer("llmaas_landing[]", landings)  # type: ignore[arg-type]


def _decode_at(  # noqa: PLR0913, PLR0917 -- the C call's arguments
    call: Any,
    geom: KVGeometry,
    addresses: Sequence[int],
    sizes: Sequence[int],
    firsts: Sequence[int],
    target: Any,
    n_cells: int,
) -> int:
    if len(addresses) != len(sizes):
        what = f"{len(addresses)} addresses and {len(sizes)} sizes for {len(firsts)} first cells"
        raise fail(what, lib.LLMAAS_EINVAL)
    table = as_array("uintptr_t[]", addresses)  # the name keeps the array alive; the cast does not
    return _decode(call, geom, ffi.cast("uint8_t **", table), sizes, firsts, target, n_cells)


def _decode(  # noqa: PLR0913, PLR0917 -- the C call's arguments
    call: Any,
    geom: KVGeometry,
    table: Any,
    sizes: Sequence[int],
    firsts: Sequence[int],
    target: Any,
    n_cells: int,
) -> int:
    """Decode with ``call`` into ``target``: the bytes of a blob, or landings."""
    n = len(sizes)
    if len(firsts) != n:
        raise fail(f"{n} payloads and {len(firsts)} first cells", lib.LLMAAS_EINVAL)
    done = ffi.new("uint32_t *")
    status = call(
        geom.handle, n, table, as_array("uint64_t[]", sizes), as_array("uint32_t[]", firsts),
        target, len(target), n_cells, done,
    )  # fmt: skip
    n_done = int(done[0])
    if status:
        where = f"payload {n_done} of {n}" if n_done < n else f"{n} payloads"
        kind = "landings" if call is lib.llmaas_chunks_land else "bytes"
        what = f"decode of {where} into {len(target)} {kind} and {n_cells} cells"
        raise fail(what, status, n_done)
    return n_done
