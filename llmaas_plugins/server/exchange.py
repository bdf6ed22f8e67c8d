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
_LAST_EVENT = b"data: [DONE]"
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
    event. The head of a whole answer has the plugins' notes about it, as JSON. They are a comment
    before the last event of OpenAI's streams, which is the first time that all of them are known.

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
        if self.is_stream and message.get("body", b"").startswith(_LAST_EVENT):
            self._held += self._comments()
        self._held.append(message)
        if not self.is_stream or message.get("body"):
            await self.flush()

    def _headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers that the service adds to an answer."""
        headers = []
        if self.cloud:
            headers.append((_ANSWERED_BY, self.cloud["answered_by"].encode()))
        if not self.is_stream and (text := self._notes()):
            headers.append((_NOTES, text))
        return headers

    def _comments(self) -> list[Message]:
        """Return the comment that the service adds to a stream, which clients ignore."""
        text = self._notes()
        body = b": %s: %s\r\n\r\n" % (_NOTES, text)
        return [{"type": "http.response.body", "body": body, "more_body": True}] if text else []

    def _notes(self) -> bytes:
        """Return the notes about an answer as JSON; nothing if there are none."""
        return _as_json({**self.notes, "cloud": self.cloud} if self.cloud else self.notes)

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


def _as_json(notes: Mapping[str, Any]) -> bytes:
    """Return notes as JSON of at most 4 KiB, without those that are no JSON, or do not fit."""
    kept, n_bytes = list[bytes](), 1
    for part in sorted((_entry(name, note) for name, note in notes.items()), key=len):
        n_bytes += len(part) + 1
        if part and n_bytes <= _MOST_NOTES_BYTES:
            kept.append(part)
    return b"{%s}" % b",".join(kept) if kept else b""


def _entry(name: str, note: object) -> bytes:
    """Return an entry of a JSON object; nothing if it cannot be one."""
    try:
        text = json.dumps({name: note}, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        _log.warning("notes of the plugin %s are left out of an answer: %s", name, error)
        return b""
    return text[1:-1].encode()
