"""The only file with version conditions."""

from __future__ import annotations

import llama_cpp

from llmaas_hooks import IncompatibleError

__all__ = ["TESTED_VERSION", "VERSION_RANGE", "check_version"]

TESTED_VERSION = "0.3.36"
VERSION_RANGE = ">=0.3.36,<0.4"
_LOWEST = (0, 3, 36)
_BELOW = (0, 4)


def check_version() -> None:
    """Refuse a llama-cpp-python outside the range the patches were written for.

    Raises:
        IncompatibleError: With the version found and the range expected.
    """
    found = llama_cpp.__version__
    try:
        parts = tuple(int(part) for part in found.split("+")[0].split(".")[:3])
    except ValueError:
        parts = ()
    if not _LOWEST <= parts < _BELOW:
        raise IncompatibleError(
            f"llama-cpp-python {found} is installed, {VERSION_RANGE} is needed "
            f"(tested: {TESTED_VERSION}). Try `pip install llama-cpp-python=={TESTED_VERSION}`."
        )
