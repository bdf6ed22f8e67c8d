"""TLS handshakes as connections: they count for the limit, and must end in time."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any, cast

from llmaas_plugins.config import ServiceConfig
from llmaas_plugins.server.connection_limit import make_room

__all__ = ["Handshake"]


class Handshake(asyncio.Protocol):
    """A connection from its acceptance to the end of its TLS handshake.

    A server that is made with an SSL context tells its protocols of a connection only after the
    handshake, so that clients could hold any number of unfinished ones. This protocol is told at
    once, and then hands the connection over. The whole handshake must take no longer than
    ``client_timeout_s``, and so must the end of TLS when the connection is closed.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        limits: ServiceConfig,
        connections: set[Any],
        make: Callable[[], asyncio.Protocol],
    ) -> None:
        """Prepare for a connection.

        Args:
            context: Certificate and settings of TLS.
            limits: Most connections, and the time for the handshake.
            connections: All connections of the server, which has this one until its handshake ends.
            make: Function that returns the protocol for the time after the handshake.
        """
        self._context = context
        self._limits = limits
        self._connections = connections
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        self._early = b""
        self._is_lost = False
        self.is_dropped = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the handshake; drop a connection if there are too many."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.pause_reading()  # the first bytes are for the handshake
        self._connections.add(self)
        self._task = self._loop.create_task(self._run())
        make_room(self._connections, self, self._limits.max_connections)

    def data_received(self, data: bytes) -> None:
        """Keep what the client sent together with the end of its handshake."""
        self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the connection ended before it could be handed over."""
        del exc
        self._is_lost = True

    def may_go(self) -> bool:
        """Return True: nobody is served yet."""
        return True

    def rank(self) -> tuple[bool, float]:
        """Return the rank of a connection without a key."""
        return False, self._since

    def drop(self) -> None:
        """Close the connection. Nothing can be said before the handshake has ended."""
        self.is_dropped = True
        self._transport.abort()

    def shutdown(self) -> None:
        """Close the connection, because the server ends."""
        self._transport.abort()

    async def _run(self) -> None:
        tls = None
        try:
            if not self._transport.is_closing():
                tls = await self._loop.start_tls(
                    self._transport,
                    self,
                    self._context,
                    server_side=True,
                    ssl_handshake_timeout=self._limits.client_timeout_s,
                    ssl_shutdown_timeout=self._limits.client_timeout_s,
                )
        except OSError:  # no TLS, too slow, or gone
            self._transport.abort()
        finally:
            self._connections.discard(self)
        if tls is not None and not tls.is_closing() and not self._is_lost:
            self._hand_over(tls)

    def _hand_over(self, tls: asyncio.Transport) -> None:
        connection = self._make()
        tls.set_protocol(connection)
        connection.connection_made(tls)
        if self._early:
            connection.data_received(self._early)
