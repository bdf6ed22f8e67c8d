"""Which instruction set the core runs on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._ffi import ffi, lib
from .base import as_input, fail

if TYPE_CHECKING:
    from .base import Bytes

__all__ = ["crc32c", "kernels_name", "kernels_select"]


def kernels_name() -> str:
    """Name the kernels in use: ``generic``, ``avx2``, ``avx512`` or ``avx512vnni``."""
    return ffi.string(lib.llmaas_kernels_name()).decode()


def kernels_select(name: str) -> None:
    """Switch kernels, for tests and benches; ``LLMAAS_KERNELS`` does it from outside.

    Raises:
        NativeError: The name is unknown (EINVAL) or this CPU lacks it (EUNSUPPORTED).
    """
    status = lib.llmaas_kernels_select(name.encode())
    if status:
        raise fail(f"kernels {name!r}, known are generic, avx2, avx512, avx512vnni", status)


def crc32c(data: Bytes, crc: int = 0) -> int:
    """CRC-32C of a buffer, continuing from ``crc``."""
    view = as_input(data)
    return lib.llmaas_crc32c(crc, view, len(view))
