"""Anonymous memory, in huge pages where the system provides them.

O_DIRECT reads into huge pages are two to three times as fast as into normal pages. The device then
gets a few large segments instead of one per page.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np
from numpy.typing import NDArray

__all__ = ["discard_pages", "map_huge_pages", "map_small_pages"]

_HUGE = 2 << 20
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


def map_huge_pages(n_bytes: int) -> NDArray[np.uint8]:
    """Return a zeroed array of ``n_bytes``, aligned to 2 MiB; pages are committed when touched."""
    whole = _mapped(n_bytes + _HUGE, "MADV_HUGEPAGE")
    start = -int(whole.ctypes.data) % _HUGE
    return whole[start : start + n_bytes]


def map_small_pages(n_bytes: int) -> NDArray[np.uint8]:
    """Return a zeroed array in small pages, of which only the touched ones take memory."""
    return _mapped(n_bytes, "MADV_NOHUGEPAGE")


def _mapped(n_bytes: int, advice: str) -> NDArray[np.uint8]:
    mapping = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, advice):
        mapping.madvise(getattr(mmap, advice))
    return np.frombuffer(mapping, dtype=np.uint8)


def discard_pages(pages: NDArray[np.uint8]) -> None:
    """Free the memory of whole pages of such an array; they then read as zeros."""
    if _madvise(pages.ctypes.data, pages.nbytes, mmap.MADV_DONTNEED):
        error = ctypes.get_errno()
        raise OSError(error, f"cannot return memory to the system: {os.strerror(error)}")
