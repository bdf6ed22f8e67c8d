"""uvicorn with limits for connections, and an end that lets the running call finish."""

from __future__ import annotations

import contextlib
import json
from asyncio import TimerHandle, Transport
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from llmaas_plugins.config import ServiceConfig
from llmaas_plugins.service.line import Line
from llmaas_plugins.service.refusal import error_body

__all__ = ["Connection", "Server"]

_LAST_BYTES_S = 2
"""Seconds at the end for answers that are on their way."""


class Connection(H11Protocol):
    """A connection that cannot be held by sending half a request, or by not reading the answer."""

    def __init__(self, *args: Any, limits: ServiceConfig, **kwargs: Any) -> None:
        """Serve a connection within ``limits``."""
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._deadlines: dict[str, TimerHandle] = {}

    def connection_made(self, transport: Transport) -> None:
        """Expect a request; refuse one connection too many."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # so that any byte that is not taken pauses writing
        self._expect("request")
        if len(self.connections) > self._limits.max_connections:
            transport.write(_too_many(self._limits.max_connections))
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        for what in list(self._deadlines):
            self._done(what)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """More of a request."""
        super().data_received(data)
        if self._is_request_incomplete():
            self._expect("request")
        else:
            self._done("request")

    def pause_writing(self) -> None:
        """The client is slow."""
        super().pause_writing()
        self._expect("reading")

    def resume_writing(self) -> None:
        """The client has taken what there was."""
        super().resume_writing()
        self._done("reading")

    def shutdown(self) -> None:
        """The server is going: wait for answers, but not for questions."""
        if self._is_request_incomplete():
            self.transport.abort()
        else:
            super().shutdown()

    def _is_request_incomplete(self) -> bool:
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def _expect(self, what: str) -> None:
        if what not in self._deadlines:
            timeout_s = self._limits.client_timeout_s
            self._deadlines[what] = self.loop.call_later(timeout_s, self.transport.abort)

    def _done(self, what: str) -> None:
        if (deadline := self._deadlines.pop(what, None)) is not None:
            deadline.cancel()


class Server(uvicorn.Server):
    """Ends in three steps: no new calls; the running one, with grace; then the connections.

    Signals only raise a number: the first one starts this, the next one leaves out the grace.
    """

    def __init__(self, app: Any, line: Line, limits: ServiceConfig, **options: Any) -> None:
        """Serve ``app``, whose calls are in ``line``; ``options`` are ``uvicorn.Config``'s."""
        super().__init__(
            uvicorn.Config(
                app,
                http=lambda *args, **kwargs: Connection(*args, limits=limits, **kwargs),
                ws="none",
                timeout_graceful_shutdown=_LAST_BYTES_S,
                **options,
            )
        )
        self._line = line
        self._grace_s = limits.shutdown_grace_s
        self._n_signals = 0
        self._ticks_left: float | None = None

    def handle_exit(self, *_: object) -> None:
        """End; a signal handler."""
        self._n_signals += 1

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:
        """Leave the handlers to the caller, whose process this is."""
        return contextlib.nullcontext()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second; True ends the server."""
        await super().on_tick(counter)
        if not self._n_signals:
            return False
        if self._ticks_left is None:
            self._line.stop()
            self._ticks_left = self._grace_s * 10
        self._ticks_left -= 1
        if self._n_signals > 1 or self._ticks_left < 0:
            self._line.end_running()
        return not len(self._line)


def _too_many(most: int) -> bytes:
    message = f"There are {most} connections, the limit. Try again later."
    body = json.dumps(error_body(503, message)).encode()
    return (
        b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n"
        b"retry-after: 1\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    )
