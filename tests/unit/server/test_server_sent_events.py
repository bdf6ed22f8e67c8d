"""Events in pieces of any size."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("fastapi")

from llmaas_plugins.server.server_sent_events import Event, EventReader

STREAM = (
    b": comment\n\n"
    b"data: one\n\n"
    b"event: error\r\ndata:two\r\ndata: three\r\nid: 7\r\nretry: 1\r\n\r\n"
    b"\n\n"
    b"event: empty\n\n"
    b"data: f\xc3\xbcnf\r\rdata: six\n\ndata: unfinished"
)
EVENTS = [
    Event(b"message", b"one"),
    Event(b"error", b"two\nthree"),
    Event(b"message", b"f\xc3\xbcnf"),
    Event(b"message", b"six"),
]


def events(pieces):
    left = list(pieces)

    async def read():
        return left.pop(0) if left else b""

    async def found():
        reader = EventReader(read)
        return [event async for event in _all(reader)]

    return asyncio.run(found())


async def _all(reader):
    while (event := await reader.next()) is not None:
        yield event


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_pieces(size):
    pieces = [STREAM[start : start + size] for start in range(0, len(STREAM), size)]
    assert events(pieces) == EVENTS


@pytest.mark.parametrize("piece", [b"x" * 65536, b"data: x\n" * 8192, b": x\n\n" * 8192])
def test_an_event_without_end_is_refused(piece):
    with pytest.raises(ValueError, match="more than"):
        events([piece] * 100)
