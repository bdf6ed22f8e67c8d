"""Server-sent events in the bytes of a stream."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import NamedTuple

__all__ = ["Event", "EventReader"]

_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")  # the last \r may be half of a line's end
_MOST_BYTES = 1 << 20


class Event(NamedTuple):
    """One event: its name, ``message`` by default, and its data."""

    name: bytes
    data: bytes


class EventReader:
    """Reader of the events in a stream, whatever pieces it arrives in."""

    def __init__(self, read: Callable[[], Awaitable[bytes]]) -> None:
        """Read pieces with ``read``, which returns nothing at the end."""
        self._read = read
        self._rest = bytearray()
        self._name, self._data = b"message", list[bytes]()

    async def next(self) -> Event | None:
        """Return the next event with data; None at the end of the stream.

        Raises:
            ValueError: An event is longer than 1 MiB.
        """
        n_bytes = 0
        while (line := await self._line()) is not None:
            if not line:
                name, data = self._name, self._data
                self._name, self._data = b"message", []
                if data:
                    return Event(name, b"\n".join(data))
            field, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if field == b"data":
                self._data.append(value)
            elif field == b"event":
                self._name = value
            n_bytes += len(line) + 1
            _check(n_bytes)
        return None

    async def _line(self) -> bytes | None:
        """Return the next line without its end; None if the stream ends before the line does."""
        searched = 0
        while not (end := _LINE_END.search(self._rest, searched)):
            searched = max(0, len(self._rest) - 1)
            if not (piece := await self._read()):
                return None
            self._rest += piece
            _check(len(self._rest) - len(piece))
        line = bytes(self._rest[: end.start()])
        del self._rest[: end.end()]
        return line


def _check(n_bytes: int) -> None:
    if n_bytes > _MOST_BYTES:
        raise ValueError(f"an event has more than {_MOST_BYTES:,} bytes")
