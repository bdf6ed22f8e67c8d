"""Parse sizes, for every setting and option that takes one."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ByteSize, Field, ValidationInfo
from pydantic_core import PydanticCustomError

from llmaas_plugins.machine import nearest_directory, total_bytes

__all__ = [
    "Count",
    "DiskSize",
    "MemorySize",
    "OptionalMemorySize",
    "OptionalSize",
    "Seconds",
    "Size",
    "memory_bytes",
    "size_bytes",
]

_SIZE = re.compile(
    r"(\d{1,20}(?:\.\d{1,20})?)\s*(?:([kmgtp]?)(i?)b|([kmgtp]))?", re.IGNORECASE | re.ASCII
)
_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,20})?)\s*%", re.ASCII)
_POWERS = "kmgtp"
_MOST = 1 << 62
_LEAST_MEMORY = 1 << 20
_NO_SIZE = "expected a size such as 3 GiB"
_NO_SHARE = "expected a size such as 3 GiB, or a share such as 60%"


def size_bytes(value: Any) -> int:
    """Return the bytes of a size: ``3 GiB`` (1024³), ``3 GB`` (1000³), or a number.

    Raises:
        ValueError: The value is no size.
    """
    n_bytes = value if isinstance(value, int) and not isinstance(value, bool) else None
    if isinstance(value, str) and (found := _SIZE.fullmatch(value.strip())) is not None:
        number, prefix, binary, short = found.groups()
        power = _POWERS.find((prefix or short or "").lower()) + 1 if prefix or short else 0
        if power or not binary:
            whole, _, part = number.partition(".")
            unit = (1024 if binary else 1000) ** power
            n_bytes = int(whole) * unit + int(part or 0) * unit // 10 ** len(part)
    if n_bytes is None or not 0 <= n_bytes <= _MOST:
        raise ValueError(_NO_SIZE)
    return n_bytes


def memory_bytes(value: Any) -> int:
    """Return the bytes of a size, or of a share such as ``60%`` of the memory.

    The memory is the machine's, or the limit of this process's cgroup if that is less.

    Raises:
        ValueError: The value is neither a size nor a share.
    """
    share = _share(value)
    return _size_beside_share(value) if share is None else int(share * total_bytes())


def _share(value: Any) -> float | None:
    """Return the share of a percentage, or None if the value is no percentage."""
    found = _SHARE.fullmatch(value.strip()) if isinstance(value, str) else None
    share = float(found[1]) / 100 if found else None
    if share is not None and not 0 < share <= 1:
        raise ValueError(_NO_SHARE)
    return share


def _size_beside_share(value: Any) -> int:
    try:
        return size_bytes(value)
    except ValueError as error:
        raise ValueError(_NO_SHARE) from error


def _memory_budget(value: Any) -> int:
    """Return the bytes of a memory budget; fewer than 1 MiB are a forgotten unit."""
    n_bytes = memory_bytes(value)
    if n_bytes < _LEAST_MEMORY:
        raise ValueError("expected at least 1 MiB; write the unit, as in 600 MiB")
    return n_bytes


def _disk_bytes(value: Any, info: ValidationInfo) -> int:
    """Return bytes; a share refers to the file system under the ``store`` of the same table."""
    share = _share(value)
    if share is None:
        return _size_beside_share(value)
    store = info.data.get("store")
    if store is None:
        raise ValueError("expected a store: the share refers to its file system")
    return int(share * shutil.disk_usage(nearest_directory(Path(store))).total)


def _checked(parse: Callable[..., int]) -> Any:
    """Return a validator that leaves None to the type and reports errors in one line."""

    def validate(value: Any, info: ValidationInfo) -> int | None:
        if value is None:
            return None
        try:
            return parse(value, info) if parse is _disk_bytes else parse(value)
        except ValueError as error:
            raise PydanticCustomError("size", "{message}", {"message": str(error)}) from error

    return BeforeValidator(validate)


Count = Annotated[int, Field(le=(1 << 31) - 1)]
"""Setting that counts something; llama.cpp and the files take no larger numbers."""
Seconds = Annotated[float, Field(le=31_536_000, allow_inf_nan=False)]
"""Setting in seconds, a year at most, which timers of every kind can wait."""
Size = Annotated[ByteSize, _checked(size_bytes)]
"""Setting in bytes."""
OptionalSize = Annotated[ByteSize | None, _checked(size_bytes)]
"""Setting in bytes, or None."""
MemorySize = Annotated[ByteSize, _checked(_memory_budget)]
"""Setting in bytes, at least 1 MiB, or as a share of the memory."""
OptionalMemorySize = Annotated[ByteSize | None, _checked(_memory_budget)]
"""Setting in bytes, at least 1 MiB, or as a share of the memory, or None."""
DiskSize = Annotated[ByteSize, _checked(_disk_bytes)]
"""Setting in bytes, or as a share of the file system under the preceding field ``store``."""
