"""The only file with version conditions."""

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
"""Ends before the first release that was not tried; ``pyproject.toml`` says the same."""
_LOWEST = (0, 3, 35)
_BELOW = (0, 3, 37)


def check_version() -> None:
    """Refuse a llama-cpp-python outside the range the patches were written for.

    Raises:
        IncompatibleError: With the version found and the range expected.
    """
    if not _LOWEST <= number(llama_cpp.__version__) < _BELOW:
        raise IncompatibleError(
            f"llama-cpp-python {llama_cpp.__version__} is installed, {VERSION_RANGE} is needed "
            f"(tested: {', '.join(TESTED_VERSIONS)}). "
            f"Try `pip install llama-cpp-python=={NEWEST_VERSION}`."
        )


def is_since(version: str) -> bool:
    """Tell whether the installed llama-cpp-python is ``version`` or newer."""
    return number(llama_cpp.__version__) >= number(version)


def number(version: str) -> tuple[int, ...]:
    """Split a version into numbers; empty if it has others than a release."""
    try:
        return tuple(int(part) for part in version.split("+", maxsplit=1)[0].split(".")[:3])
    except ValueError:
        return ()
