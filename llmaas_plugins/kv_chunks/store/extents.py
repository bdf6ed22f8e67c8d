"""First-fit allocation of 4 KiB pages in an arena or a slab."""

from __future__ import annotations

import bisect
import operator

__all__ = ["PAGE", "ExtentAllocator", "page_round"]

PAGE = 4096


def page_round(n_bytes: int) -> int:
    """Round ``n_bytes`` up to whole pages."""
    return -(-n_bytes // PAGE) * PAGE


class ExtentAllocator:
    """Free space of ``[0, capacity)`` as a sorted list of disjoint, non-adjacent runs."""

    def __init__(self, capacity: int) -> None:
        """Start with everything free; a partial last page is never used."""
        self.capacity = capacity // PAGE * PAGE
        self._starts: list[int] = [0] if self.capacity else []
        self._ends: list[int] = [self.capacity] if self.capacity else []
        self.used = 0

    def allocate(self, n_bytes: int) -> int | None:
        """Take the first free run of ``n_bytes``, in whole pages; return its offset or None."""
        size = page_round(n_bytes)
        for i, start in enumerate(self._starts):
            if self._ends[i] - start >= size:
                self._take(i, start, start + size)
                return start
        return None

    def claim(self, offset: int, n_bytes: int) -> bool:
        """Take exactly this run; return False if any part of it is taken or out of range."""
        end = offset + page_round(n_bytes)
        i = bisect.bisect_right(self._starts, offset) - 1
        if offset % PAGE or n_bytes <= 0 or i < 0 or end > self._ends[i]:
            return False
        self._take(i, offset, end)
        return True

    def release(self, offset: int, n_bytes: int) -> None:
        """Free a run.

        Raises:
            ValueError: Part of it is free already.
        """
        end = offset + page_round(n_bytes)
        i = bisect.bisect_left(self._starts, offset)
        if (i > 0 and self._ends[i - 1] > offset) or (
            i < len(self._starts) and self._starts[i] < end
        ):
            raise ValueError(f"extent [{offset}, {end}) is free already")
        self.used -= end - offset
        joins_left = i > 0 and self._ends[i - 1] == offset
        joins_right = i < len(self._starts) and self._starts[i] == end
        if joins_left and joins_right:
            self._ends[i - 1] = self._ends[i]
            del self._starts[i], self._ends[i]
        elif joins_left:
            self._ends[i - 1] = end
        elif joins_right:
            self._starts[i] = offset
        else:
            self._starts.insert(i, offset)
            self._ends.insert(i, end)

    def longest(self) -> int:
        """Return the length of the longest free run."""
        return max(map(operator.sub, self._ends, self._starts), default=0)

    def free_within(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the free runs inside ``[start, end)`` as offsets and lengths."""
        runs = []
        for i in range(max(0, bisect.bisect_right(self._starts, start) - 1), len(self._starts)):
            if self._starts[i] >= end:
                break
            first, last = max(start, self._starts[i]), min(end, self._ends[i])
            if first < last:
                runs.append((first, last - first))
        return runs

    def shrink(self, offset: int, old_bytes: int, new_bytes: int) -> None:
        """Free the tail of a run that is now shorter."""
        keep = page_round(new_bytes)
        if page_round(old_bytes) > keep:
            self.release(offset + keep, page_round(old_bytes) - keep)

    def _take(self, i: int, start: int, end: int) -> None:
        free_start, free_end = self._starts[i], self._ends[i]
        pieces = [(a, b) for a, b in ((free_start, start), (end, free_end)) if a < b]
        self._starts[i : i + 1] = [a for a, _ in pieces]
        self._ends[i : i + 1] = [b for _, b in pieces]
        self.used += end - start
