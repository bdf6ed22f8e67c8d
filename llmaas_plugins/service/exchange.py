"""One request and its answer, as ASGI messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from llmaas_plugins.service.refusal import Refusal

__all__ = ["Answer", "Message", "Question", "Receive", "Send", "header"]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Question:
    """What was received so far."""

    def __init__(self, receive: Receive) -> None:
        """Nothing yet."""
        self._receive = receive
        self._is_complete = False

    async def receive(self) -> Message:
        """The next message."""
        message = await self._receive()
        self._is_complete = not message.get("more_body", False)
        return message

    async def discard(self, most: int) -> None:
        """Read to the end: who is still sending when we close does not see our answer."""
        n_bytes = 0
        while not self._is_complete and n_bytes < most:
            n_bytes += len((await self.receive()).get("body", b""))


class Answer:
    """What was sent so far.

    A stream's head waits for its first event, and its end for the end of the app: one that fails at
    once still gets its status, and one that fails later an event that says so.
    """

    def __init__(self, send: Send) -> None:
        """Nothing yet."""
        self._send = send
        self._held: list[Message] = []
        self._has_begun = self._is_complete = False
        self.status = 0
        self.is_stream = False

    async def send(self, message: Message) -> None:
        """Send what the app says, or keep it for a moment."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.is_stream = header(message, b"content-type").startswith(b"text/event-stream")
        self._held.append(message)
        if not self.is_stream or message.get("body"):
            await self.flush()

    async def flush(self) -> None:
        """Send what was kept."""
        while self._held:
            message = self._held.pop(0)
            self._has_begun = True
            self._is_complete = message["type"].endswith("body") and not message.get("more_body")
            await self._send(message)

    async def refuse(self, refusal: Refusal) -> None:
        """Answer with a refusal, as far as that is still possible."""
        self._held.clear()
        if not self._has_begun:
            self.status = refusal.status
            body = refusal.body()
            headers = [*refusal.headers, (b"content-length", b"%d" % len(body))]
            start = {"type": "http.response.start", "status": refusal.status}
            await self._send({**start, "headers": headers})
            await self._send({"type": "http.response.body", "body": body})
        elif self.is_stream and not self._is_complete:
            await self._send({"type": "http.response.body", "body": refusal.event()})


def header(message: Message, name: bytes) -> bytes:
    """The first header of that name in a scope or a head; empty if there is none."""
    return next((value for key, value in message.get("headers", ()) if key == name), b"")
