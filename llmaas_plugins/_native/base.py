"""Status codes of the C core, and the errors raised for them."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeAlias

from llmaas_hooks.errors import CodecError

from ._ffi import ffi, lib

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from _typeshed import ReadableBuffer
    from numpy.typing import NDArray

    Bytes: TypeAlias = ReadableBuffer | NDArray[np.uint8]

__all__ = ["NativeError", "Status"]

KEY_BYTES = 32


class Status(IntEnum):
    """Result of a call of the core."""

    OK = 0
    EINVAL = 1
    ECORRUPT = 2
    ESPACE = 3
    EIO = 4
    EBUDGET = 5
    EUNSUPPORTED = 6
    ESTALE = 7


class NativeError(CodecError):
    """Failed call of the core.

    Attributes:
        status: Status returned by the core. It distinguishes damage from a foreign key or an
            unsupported value.
        n_done: Number of leading payloads that are in place (``chunks_decode`` only, else 0).
    """

    def __init__(self, message: str, status: Status, n_done: int = 0) -> None:
        """Store the status and the progress with the message."""
        super().__init__(message)
        self.status = status
        self.n_done = n_done


_REASONS = {
    Status.EINVAL: "an argument is out of range",
    Status.ECORRUPT: "the bytes are damaged or not in the expected layout",
    Status.ESPACE: "the destination has the wrong size",
    Status.EUNSUPPORTED: "the value or layout cannot be represented",
    Status.ESTALE: "it was written under another key or geometry",
}


def fail(what: str, status: int, n_done: int = 0) -> NativeError:
    """Build the error of a failed call; ``what`` names the operation and its figures."""
    code = Status(status)
    return NativeError(f"{what}: {_REASONS.get(code, 'failed')} ({code.name})", code, n_done)


def as_input(buffer: Bytes) -> Any:
    """View any contiguous buffer, such as an ndarray, as ``uint8_t[]`` without copying."""
    return ffi.from_buffer("uint8_t[]", buffer)  # type: ignore[arg-type]


def as_output(buffer: Bytes) -> Any:
    """View a writable buffer as ``uint8_t[]``; raise ``BufferError`` for a read-only one."""
    return ffi.from_buffer("uint8_t[]", buffer, require_writable=True)  # type: ignore[arg-type]


def as_array(cdecl: str, values: Sequence[int]) -> Any:
    """Copy a sequence into a C array; cffi itself accepts only lists and tuples."""
    return ffi.new(cdecl, values if isinstance(values, list | tuple) else list(values))


def as_key(key: Bytes) -> Any:
    """View a 32-byte chunk key."""
    view = ffi.from_buffer("uint8_t[]", key)  # type: ignore[arg-type]
    if len(view) != KEY_BYTES:
        raise fail(f"chunk key of {len(view)} bytes, expected {KEY_BYTES}", lib.LLMAAS_EINVAL)
    return view
