"""Supported versions of llama-cpp-python; no other file has version conditions."""

from __future__ import annotations

import llama_cpp

from llmaas_hooks import IncompatibleError

__all__ = [
    "NEWEST_VERSION",
    "TESTED_VERSIONS",
    "VERSION_RANGE",
    "check_version",
    "is_since",
    "number",
]

TESTED_VERSIONS = ("0.3.35", "0.3.36")
"""Releases of llama-cpp-python on which the whole test suite passes, oldest first."""
NEWEST_VERSION = TESTED_VERSIONS[-1]
VERSION_RANGE = ">=0.3.35,<0.3.37"
"""Supported range, which ends before the first untested release; as in ``pyproject.toml``."""
_LOWEST = (0, 3, 35)
_BELOW = (0, 3, 37)


def check_version() -> None:
    """Refuse a llama-cpp-python outside the supported range.

    Raises:
        IncompatibleError: The installed version is outside the range.
    """
    if not _LOWEST <= number(llama_cpp.__version__) < _BELOW:
        raise IncompatibleError(
            f"llama-cpp-python {llama_cpp.__version__} is installed, but {VERSION_RANGE} is needed "
            f"(tested: {', '.join(TESTED_VERSIONS)}). "
            f"Try `pip install llama-cpp-python=={NEWEST_VERSION}`."
        )


def is_since(version: str) -> bool:
    """Return whether the installed llama-cpp-python is ``version`` or newer."""
    return number(llama_cpp.__version__) >= number(version)


def number(version: str) -> tuple[int, ...]:
    """Split a version into numbers; return an empty tuple if a part is not a number."""
    try:
        return tuple(int(part) for part in version.split("+", maxsplit=1)[0].split(".")[:3])
    except ValueError:
        return ()
