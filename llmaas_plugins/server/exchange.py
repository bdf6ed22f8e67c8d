"""One request and its answer, as ASGI messages."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from llmaas_plugins.server.refusal import Refusal

__all__ = ["CALLER", "Answer", "Message", "Question", "Receive", "Send", "header"]

CALLER = "llmaas.caller"
"""Key of a request's scope: the app that calls, or an empty string if it is unknown."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_NOTES = b"x-llmaas-notes"
_ANSWERED_BY = b"x-llmaas-answered-by"
_MOST_NOTES_BYTES = 4096

_log = logging.getLogger("llmaas.server")


class Question:
    """Messages of a request received so far."""

    def __init__(self, receive: Receive) -> None:
        """Start before the first message."""
        self._receive = receive
        self._is_complete = False

    async def receive(self) -> Message:
        """Receive the next message."""
        message = await self._receive()
        self._is_complete = not message.get("more_body", False)
        return message

    async def discard(self, most: int) -> None:
        """Read the request to its end.

        A client that is still sending when the connection closes would miss our answer.
        """
        n_bytes = 0
        while not self._is_complete and n_bytes < most:
            n_bytes += len((await self.receive()).get("body", b""))


class Answer:
    """Messages of an answer sent so far.

    A stream's head is held back until its first event, and its end until the app ends. A stream
    that fails at once therefore still gets an error status. One that fails later gets an error
    event. The head of a whole answer has the plugins' notes about it, as JSON.

    Attributes:
        status: Status of the answer; 0 before its head.
        is_stream: Whether the answer is a stream of events.
        is_refused: Whether the answer is a refusal that must be ended.
        notes: Notes of plugins, by plugin.
        cloud: Whether the cloud or the local model answers (``answered_by``), and in the latter
            case why (``reason``); empty if the cloud does not concern the request.
    """

    def __init__(self, send: Send) -> None:
        """Start before the first message."""
        self._send = send
        self._held: list[Message] = []
        self._has_begun = self._is_complete = False
        self.status = 0
        self.is_stream = self.is_refused = False
        self.notes: Mapping[str, Any] = {}
        self.cloud: Mapping[str, str] = {}

    @property
    def has_begun(self) -> bool:
        """Whether anything has been sent."""
        return self._has_begun

    async def send(self, message: Message) -> None:
        """Send a message of the app, or hold it back for now."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.is_stream = header(message, b"content-type").startswith(b"text/event-stream")
            message = {**message, "headers": [*message["headers"], *self._headers()]}
        self._held.append(message)
        if not self.is_stream or message.get("body"):
            await self.flush()

    def _headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers that the service adds to an answer."""
        headers = []
        if self.cloud:
            headers.append((_ANSWERED_BY, self.cloud["answered_by"].encode()))
        notes = {**self.notes, "cloud": self.cloud} if self.cloud else self.notes
        if notes and not self.is_stream:
            headers += _notes(notes)
        return headers

    async def flush(self) -> None:
        """Send the messages that were held back."""
        while self._held:
            message = self._held.pop(0)
            self._has_begun = True
            self._is_complete = message["type"].endswith("body") and not message.get("more_body")
            await self._send(message)

    async def refuse(self, refusal: Refusal) -> None:
        """Answer with a refusal, as far as the messages already sent allow; ``end`` must follow."""
        self._held.clear()
        if not self._has_begun:
            self.status = refusal.status
            body = refusal.body()
            headers = [*refusal.headers, (b"content-length", b"%d" % len(body))]
            start = {"type": "http.response.start", "status": refusal.status}
            await self._send({**start, "headers": headers})
            self.is_refused = True
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
        elif self.is_stream and not self._is_complete:
            await self._send({"type": "http.response.body", "body": refusal.event()})

    async def end(self) -> None:
        """End a refusal, after which the server may close the connection."""
        if self.is_refused:
            await self._send({"type": "http.response.body"})


def header(message: Message, name: bytes) -> bytes:
    """Return the first header with this name in a scope or head; empty if it has none."""
    return next((value for key, value in message.get("headers", ()) if key == name), b"")


def _notes(notes: Mapping[str, Any]) -> list[tuple[bytes, bytes]]:
    """Return the header of plugins' notes; none if they are no JSON, or long."""
    try:
        text = json.dumps(notes, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        _log.warning("notes of plugins are left out of an answer: %s", error)
        return []
    return [(_NOTES, text)] if len(text) <= _MOST_NOTES_BYTES else []
