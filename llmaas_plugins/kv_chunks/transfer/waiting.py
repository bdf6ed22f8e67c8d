"""Wait for threads that write into memory which others use next."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any

__all__ = ["wait_for_all"]


def wait_for_all(futures: Sequence[Future[Any]]) -> None:
    """Wait until all have ended, whatever interrupts this thread meanwhile, and raise it then."""
    interruption = None
    while True:
        try:
            wait(futures)
            break
        except BaseException as error:  # Ctrl-C, maybe a second one
            interruption = error
    if interruption is not None:
        raise interruption
