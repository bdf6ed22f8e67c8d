"""Batched reads and writes of chunk payloads in a slab file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from llmaas_hooks.errors import StoreError

from ._ffi import ffi, lib
from .base import KEY_BYTES, Status, as_array, fail

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["STORE_BLOCK", "store_erase", "store_read", "store_write"]

STORE_BLOCK: int = lib.LLMAAS_STORE_BLOCK

_STATUSES = tuple(Status)
_ALIGNED = f"offsets and addresses are multiples of {STORE_BLOCK}"


def store_read(  # noqa: PLR0913 -- extents, destinations, keys and priority
    fd: int,
    offsets: Sequence[int],
    lengths: Sequence[int],
    addresses: Sequence[int],
    keys: Sequence[bytes],
    *,
    is_ahead: bool = False,
) -> list[Status]:
    """Read payloads to addresses, and verify them.

    Offsets and addresses are multiples of 4 KiB. Each address has room for whole blocks. Payloads
    may be in any order: adjacent ones, also across small gaps, are read together, at most 1 MiB of
    payloads per read. Several reads run concurrently.

    Args:
        fd: Descriptor of the slab, possibly opened with O_DIRECT.
        offsets: Offsets in the file.
        lengths: Payload bytes.
        addresses: Destination addresses.
        keys: Expected keys of the payloads.
        is_ahead: Whether this is a read-ahead, which gives way to reads that a caller waits for.

    Returns:
        For each payload: OK, ESTALE (another key), ECORRUPT, or EIO (read error or end of file).
    """
    n = len(offsets)
    if not n == len(lengths) == len(addresses) == len(keys):
        raise fail(
            "store_read: offsets, lengths, addresses and keys differ in number", lib.LLMAAS_EINVAL
        )
    joined = b"".join(keys)
    if len(joined) != n * KEY_BYTES:
        raise fail(
            f"store_read: keys of {len(joined)} bytes, expected {KEY_BYTES} each", lib.LLMAAS_EINVAL
        )
    table, statuses = as_array("uintptr_t[]", addresses), ffi.new("int32_t[]", n)
    key_table = ffi.cast("uint8_t (*)[32]", ffi.from_buffer("uint8_t[]", joined))
    status = lib.llmaas_store_read(
        fd, n, as_array("uint64_t[]", offsets), as_array("uint64_t[]", lengths),
        ffi.cast("uint8_t **", table), key_table, is_ahead, statuses,
        ffi.new("llmaas_io_stats *"),
    )  # fmt: skip
    if status:
        raise fail(f"store_read of {n} extents ({_ALIGNED})", status)
    return [_STATUSES[code] for code in statuses]


def store_write(
    fd: int, offsets: Sequence[int], lengths: Sequence[int], addresses: Sequence[int]
) -> int:
    """Write payloads from addresses, in whole 4 KiB blocks.

    Args:
        fd: Descriptor of the slab, possibly opened with O_DIRECT.
        offsets: Offsets in the file, multiples of 4 KiB.
        lengths: Payload bytes.
        addresses: Addresses of the payloads, multiples of 4 KiB; whole blocks are read from there.

    Returns:
        Bytes written, including padding.

    Raises:
        StoreError: A write failed; the error has the errno of the first failure.
    """
    n = len(offsets)
    if not n == len(addresses) == len(lengths):
        raise fail(
            "store_write: offsets, lengths and addresses differ in number", lib.LLMAAS_EINVAL
        )
    table, stats = ffi.new("uintptr_t[]", addresses), ffi.new("llmaas_io_stats *")
    status = lib.llmaas_store_write(
        fd, n, ffi.new("uint64_t[]", offsets), ffi.new("uint64_t[]", lengths),
        ffi.cast("uint8_t **", table), stats,
    )  # fmt: skip
    if status == Status.EIO:
        raise _failed("write", stats)
    if status:
        raise fail(f"store_write of {n} extents ({_ALIGNED})", status)
    return int(stats.bytes)


def store_erase(fd: int, offsets: Sequence[int], lengths: Sequence[int]) -> int:
    """Turn extents into holes, or into zeros where the file system has no holes.

    Args:
        fd: Descriptor of the slab, opened without O_DIRECT.
        offsets: Offsets in the file, multiples of 4 KiB.
        lengths: Bytes to erase; rounded up to whole blocks.

    Returns:
        Bytes erased.

    Raises:
        StoreError: A call failed; the error has the errno of the first failure.
    """
    n = len(offsets)
    if n != len(lengths):
        raise fail("store_erase: offsets and lengths differ in number", lib.LLMAAS_EINVAL)
    stats = ffi.new("llmaas_io_stats *")
    status = lib.llmaas_store_erase(
        fd, n, as_array("uint64_t[]", offsets), as_array("uint64_t[]", lengths), stats
    )
    if status == Status.EIO:
        raise _failed("erasing", stats)
    if status:
        raise fail(f"store_erase of {n} extents ({_ALIGNED})", status)
    return int(stats.bytes)


def _failed(what: str, stats: Any) -> StoreError:
    code = stats.sys_errno
    message = f"chunk store: {what} stopped after {stats.bytes} bytes: {os.strerror(code)}"
    return StoreError(code, message)
