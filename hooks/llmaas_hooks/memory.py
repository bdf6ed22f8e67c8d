"""Memory that plugins hold, and the time that it saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

__all__ = ["MemoryClaim"]


@dataclass(frozen=True, slots=True)
class MemoryClaim:
    """Memory that a plugin can make use of, or holds because it needs it (``reserved``).

    Attributes:
        owner: Contents of the memory in a few words, such as "weights kept in memory".
        held: Bytes that the plugin may use now.
        most: Bytes beyond which more memory is of no use.
        saved: Time that the memory would save, as points of bytes and seconds a second (seconds
            saved in each second of the recent past), ascending in both from (0, 0) on. Between two
            points a line is assumed. No point beyond (0, 0) means that nothing is known yet, and a
            point with 0 seconds that such memory is known to save nothing.
        resize: Function that sets the bytes that the plugin may use. It releases what is more
            before it returns. It is called on a thread of its own, and may wait. None for memory
            that the plugin needs and never gives back: it has no part in the division.
        least: Bytes that the plugin does not give back now, such as those in use.
        taken: Bytes of ``held`` that take memory now; None for all of them.
        why: Reason why the plugin has the memory, in a few words; for memory that can be given
            back the time that it saves is told, too.
    """

    owner: str
    held: int
    most: int
    saved: tuple[tuple[int, float], ...]
    resize: Callable[[int], None] | None
    least: int = 0
    taken: int | None = None
    why: str = ""

    @property
    def is_known(self) -> bool:
        """Whether it is known what the memory saves, even if that is nothing."""
        return any(n_bytes for n_bytes, _ in self.saved)

    def plain(self) -> Self:
        """Return the claim with integers of Python itself, the only ones that JSON takes."""
        return replace(
            self,
            held=int(self.held),
            most=int(self.most),
            least=int(self.least),
            taken=None if self.taken is None else int(self.taken),
        )

    @classmethod
    def reserved(cls, owner: str, held: int, why: str) -> Self:
        """Return a claim of memory that the plugin needs and never gives back."""
        return cls(owner, held, held, (), None, held, None, why)
