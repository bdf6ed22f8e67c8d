"""Memory that plugins hold, and the time that it saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["MemoryClaim"]


@dataclass(frozen=True, slots=True)
class MemoryClaim:
    """Memory that a plugin can make use of.

    Attributes:
        owner: Contents of the memory in a few words, such as "weights kept in memory".
        held: Bytes that the plugin may use now.
        most: Bytes beyond which more memory is of no use.
        saved: Time that the memory would save, as points of bytes and seconds a second (seconds
            saved in each second of the recent past), ascending in both from (0, 0) on. Between two
            points a line is assumed. No point beyond (0, 0) means that nothing is known yet.
        resize: Function that sets the bytes that the plugin may use. It releases what is more
            before it returns. It is called on a thread of its own, and may wait.
        least: Bytes that the plugin does not give back now, such as those in use.
    """

    owner: str
    held: int
    most: int
    saved: tuple[tuple[int, float], ...]
    resize: Callable[[int], None]
    least: int = 0
