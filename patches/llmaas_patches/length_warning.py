"""Keep back llama.cpp's warning of a context longer than the training, where it is not true.

llama.cpp compares its number of cells with the length that the model was trained for. Plugins add
cells, in which other contexts lie, so it would warn of a context that is no longer than the app's.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from typing import Any

from llama_cpp import llama_cpp

__all__ = ["no_length_warning"]

_WARNING = b"possible training context overflow"
_filtering = threading.Lock()
_before = llama_cpp.llama_log_callback()
"""The callback that gets all other messages; only used while ``_filtering`` is held."""


@contextlib.contextmanager
def no_length_warning() -> Iterator[None]:
    """Drop the warning inside the block; every other message is logged as before.

    If several threads are in such blocks, only the first one drops it: the others do not wait, as a
    forked child might for ever.
    """
    if not _filtering.acquire(blocking=False):
        yield
        return
    data = ctypes.c_void_p()
    try:
        llama_cpp.llama_log_get(ctypes.byref(_before), ctypes.byref(data))
        llama_cpp.llama_log_set(_others, data)
        try:
            yield
        finally:
            if _is_set(_others):  # else another thread has set the app's own callback meanwhile
                llama_cpp.llama_log_set(_before, data)
    finally:
        _filtering.release()


def _is_set(callback: Any) -> bool:
    found, data = llama_cpp.llama_log_callback(), ctypes.c_void_p()
    llama_cpp.llama_log_get(ctypes.byref(found), ctypes.byref(data))
    addresses = [ctypes.cast(one, ctypes.c_void_p).value for one in (found, callback)]
    return addresses[0] == addresses[1]


def _pass_on(level: int, text: bytes, data: int | None) -> None:
    if _WARNING not in text:
        _before(level, text, data)


_others = llama_cpp.llama_log_callback(_pass_on)
