"""Instruction set that the core uses, and its CRC-32C."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._ffi import ffi, lib
from .base import as_input, fail

if TYPE_CHECKING:
    from .base import Bytes

__all__ = ["crc32c", "kernels_name", "kernels_select"]


def kernels_name() -> str:
    """Return the kernels in use: ``generic``, ``avx2``, ``avx512`` or ``avx512vnni``."""
    return ffi.string(lib.llmaas_kernels_name()).decode()


def kernels_select(name: str) -> None:
    """Switch kernels, for tests and benchmarks; users set ``LLMAAS_KERNELS`` instead.

    Raises:
        NativeError: The name is unknown (EINVAL) or this CPU lacks the instructions (EUNSUPPORTED).
    """
    status = lib.llmaas_kernels_select(name.encode())
    if status:
        raise fail(f"kernels {name!r}, known are generic, avx2, avx512, avx512vnni", status)


def crc32c(data: Bytes, crc: int = 0) -> int:
    """Return the CRC-32C of a buffer, continuing from ``crc``."""
    view = as_input(data)
    return lib.llmaas_crc32c(crc, view, len(view))
