"""HTTP client for the cloud: one POST for each connection, with bounded answers and no redirects.

It sends its own headers only. Errors name the cloud's address and status, but quote neither the
cloud's texts nor the key: services repeat parts of both in their errors.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus
from urllib.parse import urlsplit

import anyio
import h11
from anyio.abc import ByteStream

from llmaas_plugins.cloud_config import CloudConfig
from llmaas_plugins.server.api_keys import key_in

__all__ = ["CloudAnswer", "CloudClient", "CloudError", "cloud_key"]

_CONNECT_S = 5.0
_MOST_HEAD_BYTES = 64 << 10
_READ_BYTES = 64 << 10
_MOST_BYTES = 64 << 20
_ABOUT_THE_REQUEST = (400, 404, 405, 413, 422)
"""Statuses that tell something about one request: a chat model has no route for completions."""


class CloudError(Exception):
    """The cloud did not answer.

    Attributes:
        is_about_request: Whether the cloud works, but refused this request.
    """

    def __init__(self, reason: str, *, is_about_request: bool = False) -> None:
        """Give a reason that is fit for logs."""
        super().__init__(reason)
        self.is_about_request = is_about_request


class CloudAnswer:
    """Successful answer, of which the head has arrived."""

    def __init__(self, head: h11.Response, connection: h11.Connection, stream: ByteStream) -> None:
        """Read the body from ``stream``."""
        self._connection, self._stream = connection, stream
        self._n_bytes = 0
        self.content_type = _header(head, b"content-type").partition(b";")[0].strip().lower()

    async def read(self) -> bytes:
        """Return the next bytes of the body; none at its end.

        Raises:
            CloudError: The body breaks off, or is too long.
        """
        event = await _next_event(self._connection, self._stream)
        data = bytes(event.data) if isinstance(event, h11.Data) else b""
        self._n_bytes += len(data)
        if self._n_bytes > _MOST_BYTES:
            raise CloudError(f"its answer is longer than {_MOST_BYTES >> 20} MiB")
        return data


class CloudClient:
    """Client of one service."""

    def __init__(self, config: CloudConfig, key: str | None) -> None:
        """Prepare to send requests with ``key``."""
        parts = urlsplit(config.base_url)
        self._host = parts.hostname or ""
        is_tls = parts.scheme == "https"
        self._port = parts.port or (443 if is_tls else 80)
        self._tls = ssl.create_default_context() if is_tls else None
        self._path = parts.path
        self._headers = [
            ("Host", parts.netloc),
            ("User-Agent", "llmaas-plugins"),
            ("Accept-Encoding", "identity"),
            ("Content-Type", "application/json"),
            ("Connection", "close"),
        ]
        if key is not None:
            self._headers.append(("Authorization", f"Bearer {key}"))
        self._key_env = config.key_env

    @contextlib.asynccontextmanager
    async def post(self, path: str, body: bytes) -> AsyncIterator[CloudAnswer]:
        """Send a request; yield the answer once its head is there; close the connection after it.

        Raises:
            CloudError: The cloud cannot be reached, or answers with another status than 200.
        """
        async with await self._connected() as stream:
            connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MOST_HEAD_BYTES)
            headers = [*self._headers, ("Content-Length", str(len(body)))]
            head = h11.Request(method="POST", target=self._path + path, headers=headers)
            parts = (head, h11.Data(data=body), h11.EndOfMessage())
            message = b"".join(connection.send(part) or b"" for part in parts)
            # a service may refuse a request before it has read all of it
            with contextlib.suppress(OSError, anyio.BrokenResourceError):
                await stream.send(message)
            event = await _next_event(connection, stream)
            while isinstance(event, h11.InformationalResponse):
                event = await _next_event(connection, stream)
            if not isinstance(event, h11.Response):
                raise CloudError("it does not answer with HTTP")
            self._check(event)
            yield CloudAnswer(event, connection, stream)

    async def _connected(self) -> ByteStream:
        try:
            with anyio.fail_after(_CONNECT_S):
                if self._tls is None:
                    return await anyio.connect_tcp(self._host, self._port)
                return await anyio.connect_tcp(
                    self._host,
                    self._port,
                    ssl_context=self._tls,
                    tls_hostname=self._host,
                    tls_standard_compatible=False,  # HTTP itself tells where a message ends
                )
        except TimeoutError as error:
            raise CloudError(f"no connection within {_CONNECT_S:g} s") from error
        except (OSError, UnicodeError, anyio.BrokenResourceError, anyio.EndOfStream) as error:
            raise CloudError(f"no connection: {error.__cause__ or error!r}") from error

    def _check(self, head: h11.Response) -> None:
        """Refuse answers that are no success.

        Raises:
            CloudError: The status is not 200, or the body is encoded although that was not asked.
        """
        if head.status_code == HTTPStatus.OK:
            if _header(head, b"content-encoding") not in (b"", b"identity"):
                raise CloudError("it compresses its answer, which nobody asked for")
            return
        reason = f"it answers with HTTP status {head.status_code}"
        if head.status_code in (401, 403):
            where = "cloud.key_env" if self._key_env is None else f"the variable {self._key_env}"
            reason += f"; check the key, {where}"
        elif head.status_code == 404:
            reason += "; check cloud.base_url and cloud.model, if that holds for all requests"
        elif 300 <= head.status_code < 400:
            reason += "; redirects are not followed, correct cloud.base_url"
        raise CloudError(reason, is_about_request=head.status_code in _ABOUT_THE_REQUEST)


def cloud_key(config: CloudConfig, environ: Mapping[str, str]) -> str | None:
    """Return the key from the environment; None if the service needs none.

    Raises:
        ConfigError: The variable is unset, or its value cannot be sent.
    """
    if config.key_env is None:
        return None
    return key_in(
        environ.get(config.key_env),
        f"cloud.key_env: the variable {config.key_env}",
        "Set it to the service's key, or remove the table [cloud].",
    )


async def _next_event(connection: h11.Connection, stream: ByteStream) -> object:
    """Return the next part of an answer.

    Raises:
        CloudError: The answer breaks off, or is not HTTP.
    """
    try:
        while (event := connection.next_event()) is h11.NEED_DATA:
            try:
                data = await stream.receive(_READ_BYTES)
            except anyio.EndOfStream:
                data = b""
            connection.receive_data(data)
    except h11.RemoteProtocolError as error:
        raise CloudError("its answer breaks off, or is not HTTP") from error
    except (OSError, anyio.BrokenResourceError) as error:
        raise CloudError("the connection broke") from error
    return event


def _header(head: h11.Response, name: bytes) -> bytes:
    return next((value for found, value in head.headers if found == name), b"")
