"""A small client for ``llmaas serve``: the service's own interface, over HTTP or a Unix socket."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from llmaas_hooks import ConfigError, LimitError, LlmaasError
from llmaas_plugins.files.json_text import parse_json

__all__ = ["ClientApp", "ClientContext", "LLMClient"]


class LLMClient:
    """A client for one service, which connects anew for each request and is safe for threads."""

    def __init__(self, address: str, api_key: str | None = None, timeout_s: float = 600) -> None:
        """Remember the service's address.

        Args:
            address: ``http://127.0.0.1:8000`` or ``unix:/path/of/the.sock``.
            api_key: The server's key, if it has one.
            timeout_s: Longest time without data from the server, in seconds.

        Raises:
            ConfigError: The address has neither form.
        """
        parts = urlsplit(address)
        if parts.scheme not in ("http", "unix"):
            raise ConfigError(f"address must be http://host:port or unix:/path, found {address!r}")
        self._address = address
        self._parts = parts
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json", "Connection": "close"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def bind(self, app: str) -> ClientApp:
        """Return the service as ``app`` sees it."""
        return ClientApp(app, self)

    def status(self) -> dict[str, Any]:
        """Return the counters of the service and its plugins."""
        status: dict[str, Any] = self.request("GET", "/status")
        return status

    def request(self, method: str, path: str, body: object = None) -> Any:
        """Send one request and return the JSON of its answer.

        Raises:
            LookupError: The context is unknown.
            LimitError: A limit of the service was reached.
            LlmaasError: The service refused the request for another reason.
            OSError: The service cannot be reached.
        """
        with self._open(method, path, body) as response, _broken_off():
            return parse_json(response.read())

    def events(self, path: str, body: object) -> Iterator[tuple[str, Any]]:
        """Send a request and yield its server-sent events as (event, JSON)."""
        with self._open("POST", path, body) as response, _broken_off():
            event = "message"
            for raw in response:
                line = raw.decode().rstrip("\r\n")
                if line.startswith("event:"):
                    event = line[6:].strip()
                elif line.startswith("data:"):
                    yield event, parse_json(line[5:])
                elif not line:
                    event = "message"

    def _open(self, method: str, path: str, body: object) -> http.client.HTTPResponse:
        host = self._parts.hostname or "localhost"
        connection = http.client.HTTPConnection(host, self._parts.port, timeout=self._timeout_s)
        data = None if body is None else json.dumps(body).encode()
        try:
            if self._parts.scheme == "unix":
                connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                connection.sock.settimeout(self._timeout_s)
                connection.sock.connect(self._parts.path)
            with _broken_off():
                connection.request(method, f"/v1/llmaas{path}", data, self._headers)
                response = connection.getresponse()  # the response owns the socket from here on
        except (ConnectionRefusedError, FileNotFoundError) as error:
            connection.close()
            raise type(error)(
                f"no service listens at {self._address}. Start one with `llmaas serve`."
            ) from error
        except BaseException:
            connection.close()
            raise
        if response.status >= http.HTTPStatus.BAD_REQUEST:
            with response, _broken_off():
                raise _refusal(response.status, _detail(response.read()))
        return response


@dataclass(frozen=True, slots=True)
class ClientApp:
    """One app's view of the service."""

    name: str
    _client: LLMClient

    @property
    def _path(self) -> str:
        return f"/apps/{quote(self.name, safe='')}/contexts"

    def new_context(self, system: str | None = None) -> ClientContext:
        """Start a context, with a system prompt if given."""
        summary = self._client.request("POST", self._path, {"system": system})
        return self.context(summary["id"])

    def contexts(self) -> list[ClientContext]:
        """Return the app's contexts, most recently used first."""
        return [self.context(item["id"]) for item in self._client.request("GET", self._path)]

    def context(self, context_id: str) -> ClientContext:
        """Return the context named ``context_id``, without checking that it exists."""
        return ClientContext(context_id, f"{self._path}/{quote(context_id, safe='')}", self._client)


@dataclass(frozen=True, slots=True)
class ClientContext:
    """A persistent context in the service."""

    id: str
    _path: str
    _client: LLMClient

    def call(self, prompt: str, **sampling: Any) -> dict[str, Any]:
        """Append a user turn and return the reply, with the fields of ``service.Reply``.

        Args:
            prompt: The user's turn.
            **sampling: Other fields of the body: ``max_tokens``, ``temperature``, ``level``, …
        """
        body = {"prompt": prompt, **sampling}
        reply: dict[str, Any] = self._client.request("POST", f"{self._path}/call", body)
        return reply

    def stream(self, prompt: str, **sampling: Any) -> Generator[str, None, dict[str, Any]]:
        """Act like ``call``, but yield pieces of text as they arrive and return the reply."""
        body = {"prompt": prompt, "stream": True, **sampling}
        for event, data in self._client.events(f"{self._path}/call", body):
            if event == "done":
                reply: dict[str, Any] = data
                return reply
            if event == "error":
                raise _refusal(data["status"], data["detail"])
            yield data["text"]
        raise LlmaasError("the service closed the stream before its reply was complete")

    def record(self) -> dict[str, Any]:
        """Return the context's messages and sizes."""
        record: dict[str, Any] = self._client.request("GET", self._path)
        return record

    def delete(self) -> int:
        """Delete the context and return the bytes of KV freed."""
        return int(self._client.request("DELETE", self._path)["freed_bytes"])


@contextlib.contextmanager
def _broken_off() -> Iterator[None]:
    """Raise ``ConnectionError`` instead of ``http.client``'s errors if an answer ends early."""
    try:
        yield
    except http.client.HTTPException as error:
        raise ConnectionError(f"the service ended its answer early: {error!r}") from error


def _detail(body: bytes) -> str:
    try:
        return str(parse_json(body)["detail"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:500]


def _refusal(status: int, detail: str) -> Exception:
    kinds: dict[int, type[Exception]] = {404: LookupError, 429: LimitError}
    return kinds.get(status, LlmaasError)(f"{detail} (HTTP {status})")
