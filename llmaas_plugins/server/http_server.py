"""uvicorn with connection limits, and a shutdown that lets the running call finish."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import socket
import ssl
import struct
from asyncio import Protocol, TimerHandle, Transport
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from llmaas_plugins.config import ServiceConfig
from llmaas_plugins.server.admission import Admission
from llmaas_plugins.server.api_keys import ApiKeys
from llmaas_plugins.server.connection_limit import make_room
from llmaas_plugins.server.exchange import header
from llmaas_plugins.server.handshake import Handshake
from llmaas_plugins.server.refusal import Refusal

__all__ = ["Connection", "Server"]

_LAST_BYTES_S = 2
"""Seconds at shutdown for sending answers that are under way."""
_DROP = struct.pack("ii", 1, 0)


class Connection(H11Protocol):
    """A connection that no client can hold without using it.

    Whatever the client must do next, it has ``client_timeout_s`` to do it: send its first or next
    request, or receive what was written. If there are too many connections, the one that has waited
    longest for its client is dropped. Connections without a valid key are dropped first, even while
    they are served.
    """

    def __init__(self, *args: Any, limits: ServiceConfig, keys: ApiKeys, **kwargs: Any) -> None:
        """Serve a connection within ``limits``."""
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._keys = keys
        self._is_known = False
        self.is_dropped = False
        self._since = self.loop.time()
        self._deadlines: dict[str, TimerHandle] = {}

    def connection_made(self, transport: Transport) -> None:
        """Expect a request; drop a connection if there are too many."""
        super().connection_made(transport)
        # Writing pauses when any byte is not taken. With 0, asyncio's TLS pauses when all are, too.
        is_tls = transport.get_extra_info("sslcontext") is not None
        transport.set_write_buffer_limits(1 if is_tls else 0, 0)
        self._watch_request()
        make_room(self.connections, self, self._limits.max_connections)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadlines of a closed connection."""
        for what in list(self._deadlines):
            self._done(what)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Process received data, which may have arrived before the last answer ended.

        Each request's task starts in a new ``contextvars`` context. Otherwise it would inherit the
        previous request's levels and disabled plugins if that request's end is what starts it.
        """
        before = self.scope
        contextvars.Context().run(super().handle_events)
        if self.scope is not before and not self._is_known:
            self._is_known = self._keys.opens(header(self.scope, b"authorization"))
        self._watch_request()

    def on_response_complete(self) -> None:
        """Expect another request."""
        self._since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Give a slow client a deadline for reading."""
        super().pause_writing()
        self._expect("reading")

    def resume_writing(self) -> None:
        """Cancel the reading deadline, because the client has taken all data."""
        super().resume_writing()
        self._done("reading")

    def shutdown(self) -> None:
        """Shut down: finish answers, but do not wait for incomplete requests."""
        if self._is_request_incomplete():
            self.transport.abort()
        else:
            super().shutdown()

    def _is_request_incomplete(self) -> bool:
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def _watch_request(self) -> None:
        if self._is_request_incomplete():
            self._expect("request")
        else:
            self._done("request")

    def may_go(self) -> bool:
        """Return whether the connection can be dropped for a new one."""
        return not self._is_known or self._is_request_incomplete()

    def rank(self) -> tuple[bool, float]:
        """Return the order of dropping: without a key first, then the longest wait."""
        return self._is_known, self._since

    def drop(self) -> None:
        """Close the connection; answer that there are too many, unless an answer has begun."""
        self.is_dropped = True
        most = self._limits.max_connections
        self._answer(503, f"There are {most} connections, the limit. Try again later.")
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Answer data that is not HTTP, and close the connection."""
        self._answer(400, msg)
        self.transport.close()

    def _answer(self, status: int, message: str) -> None:
        """Send a last answer, unless another answer has begun."""
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            self.transport.write(_last_answer(Refusal(status, message)))

    def _expect(self, what: str) -> None:
        if what not in self._deadlines:
            timeout_s = self._limits.client_timeout_s
            end = self.transport.abort if what == "request" else self._forget
            self._deadlines[what] = self.loop.call_later(timeout_s, end)

    def _forget(self) -> None:
        """Close at once, making the kernel drop unsent data, which it would keep for minutes."""
        connection = self.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DROP)
        self.transport.abort()

    def _done(self, what: str) -> None:
        if (deadline := self._deadlines.pop(what, None)) is not None:
            deadline.cancel()


class Server(uvicorn.Server):
    """Server that ends in steps: no new calls; grace for the running call; then the connections.

    Signals only increment a counter: the first one starts these steps, the next one ends the grace
    period.
    """

    def __init__(
        self,
        app: Any,
        admission: Admission,
        keys: ApiKeys,
        limits: ServiceConfig,
        *,
        tls: ssl.SSLContext | None = None,
        **options: Any,
    ) -> None:
        """Serve an app.

        Args:
            app: ASGI app.
            admission: Admission of the app's calls.
            keys: Keys that connections may show.
            limits: Limits of connections.
            tls: Certificate for HTTPS; None serves HTTP.
            **options: Further arguments of ``uvicorn.Config``.
        """

        def connection(*args: Any, **kwargs: Any) -> Protocol:
            def make() -> Connection:
                return Connection(*args, limits=limits, keys=keys, **kwargs)

            if tls is None:
                return make()
            return Handshake(tls, limits, self.server_state.connections, make)

        super().__init__(
            uvicorn.Config(
                app,
                http=connection,
                ws="none",
                proxy_headers=False,  # FORWARDED_ALLOW_IPS would let clients choose their address
                workers=1,  # WEB_CONCURRENCY is meant for servers with several
                timeout_graceful_shutdown=_LAST_BYTES_S,
                **options,
            )
        )
        self._is_tls = tls is not None
        self._admission = admission
        self._grace_s = limits.shutdown_grace_s
        self._n_signals = 0
        self._ticks_left: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and log the addresses and the page once they can be reached."""
        await super().startup(sockets)
        places = [_address(found, is_tls=self._is_tls) for found in sockets or ()]
        log = logging.getLogger("uvicorn.error")
        log.info("Listening on %s", ", ".join(places))
        for place in places:
            if not place.startswith("unix:"):  # browsers cannot reach a socket
                log.info("The page with contexts, memory and speed: %s/", place)

    def handle_exit(self, *_: object) -> None:
        """Start the end, or hasten it; callable from any thread."""
        self._n_signals += 1

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:
        """Leave the signal handlers to the caller, who owns the process."""
        return contextlib.nullcontext()

    async def on_tick(self, counter: int) -> bool:
        """Advance the end, ten times a second; return True to end the server."""
        await super().on_tick(counter)
        if not self._n_signals:
            return False
        if self._ticks_left is None:
            self._admission.stop()
            self._ticks_left = self._grace_s * 10
        self._ticks_left -= 1
        if self._n_signals > 1 or self._ticks_left < 0:
            self._admission.end_running()
        return not (len(self._admission) or self._admission.elsewhere)


def _address(listener: socket.socket, *, is_tls: bool) -> str:
    """Return the address of a listening socket, in the form that clients take."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if listener.family == socket.AF_INET6 else host
    return f"{'https' if is_tls else 'http'}://{host}:{port}"


def _last_answer(refusal: Refusal) -> bytes:
    body = refusal.body()
    headers = [*refusal.headers, (b"connection", b"close"), (b"content-length", b"%d" % len(body))]
    lines = [f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}".encode()]
    lines += [b"%s: %s" % pair for pair in headers]
    return b"\r\n".join([*lines, b"", body])
