"""Answers of the cloud as ASGI messages: whole ones, and streams of server-sent events.

The only changes to an answer are the model's name, which becomes the one that the client asked for,
and the white space of its JSON. The cloud is not trusted: whatever has another form is no answer.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anyio

from llmaas_plugins.files.json_text import parse_json
from llmaas_plugins.server.cloud_client import CloudAnswer, CloudError
from llmaas_plugins.server.exchange import Message
from llmaas_plugins.server.server_sent_events import EventReader

__all__ = ["StreamedAnswer", "WholeAnswer"]

_MOST_WHOLE_BYTES = 4 << 20
_MOST_KEPT = 1 << 20
"""Most characters of an answer that is kept."""
_INDICES = range(128)
_LAST = b"[DONE]"


class WholeAnswer:
    """Answer in one JSON document.

    Attributes:
        text: Text of a chat's answer to keep, once the cloud has completed it; empty before.
    """

    def __init__(self, model: str, *, keeps: bool) -> None:
        """Name the answering model ``model``; note the text if ``keeps``."""
        self._model, self._keeps = model, keeps
        self._body = b""
        self.text = ""

    async def begin(self, found: CloudAnswer) -> None:
        """Read all of the answer.

        Raises:
            CloudError: It is no answer.
        """
        _check_type(found, b"application/json")
        body = bytearray()
        while data := await found.read():
            body += data
            if len(body) > _MOST_WHOLE_BYTES:
                raise CloudError(f"its answer is longer than {_MOST_WHOLE_BYTES >> 20} MiB")
        values = _parsed(bytes(body))
        choices = _choices(values)
        if not choices:
            raise CloudError("its answer has no choices")
        if len(choices) == 1 and choices[0].get("finish_reason") == "stop":
            text = _text(choices[0].get("message"))
            self.text = text if self._keeps and len(text) <= _MOST_KEPT else ""
        self._body = _dumped(values | {"model": self._model})

    async def messages(self, timeout_s: float) -> AsyncIterator[Message]:
        """Yield the answer as ASGI messages."""
        del timeout_s  # nothing is awaited anymore
        length = b"%d" % len(self._body)
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        yield {"type": "http.response.start", "status": 200, "headers": headers}
        yield {"type": "http.response.body", "body": self._body}


class StreamedAnswer:
    """Answer in a stream of events.

    Attributes:
        text: Text of a chat's answer to keep, once the cloud has completed it; empty before.
    """

    def __init__(self, model: str, *, keeps: bool) -> None:
        """Name the answering model ``model``; note the text if ``keeps``."""
        self._model = model
        self._first = b""
        self._reader: EventReader | None = None
        self._pieces: list[str] = []
        self._n_left = _MOST_KEPT if keeps else -1
        self._reasons: dict[int, object] = {}
        self.text = ""

    async def begin(self, found: CloudAnswer) -> None:
        """Read the first event.

        Raises:
            CloudError: It is no answer.
        """
        _check_type(found, b"text/event-stream")
        self._reader = EventReader(found.read)
        self._first = await self._next(self._reader) or b""
        if not self._first:
            raise CloudError("its answer is empty")

    async def messages(self, timeout_s: float) -> AsyncIterator[Message]:
        """Yield the answer as ASGI messages, each event once it arrives.

        Raises:
            CloudError: The answer breaks off, or no event arrives for ``timeout_s``.
        """
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
        yield {"type": "http.response.start", "status": 200, "headers": headers}
        chunk: bytes | None = self._first
        while chunk is not None:
            yield _event(chunk)
            try:
                with anyio.fail_after(timeout_s):
                    chunk = await self._next(self._reader)
            except TimeoutError as error:
                raise CloudError(f"it stalled for {timeout_s:g} s") from error
        if list(self._reasons.values()) == ["stop"] and self._n_left >= 0:
            self.text = "".join(self._pieces)
        yield _event(_LAST)
        yield {"type": "http.response.body", "body": b""}

    async def _next(self, reader: EventReader | None) -> bytes | None:
        """Return the next chunk to send; None at the end of the answer.

        Raises:
            CloudError: The answer breaks off, or has another form.
        """
        while reader is not None:
            try:
                event = await reader.next()
            except ValueError as error:
                raise CloudError(str(error)) from error
            if event is None:
                break
            if event.data == _LAST:
                return None
            if event.name in (b"message", b"error"):
                return self._chunk(event.data)
        if not self._reasons or None in self._reasons.values():
            raise CloudError("its answer broke off")
        return None

    def _chunk(self, data: bytes) -> bytes:
        values = _parsed(data)
        for choice in _choices(values):
            index = choice.get("index") or 0
            if index not in _INDICES:
                raise CloudError("its answer has another form than OpenAI's")
            self._reasons[index] = choice.get("finish_reason") or self._reasons.get(index)
            self._add(_text(choice.get("delta")))
        return _dumped(values | {"model": self._model})

    def _add(self, piece: str) -> None:
        """Note a piece of the text, unless nothing is kept or there is too much of it."""
        self._n_left -= len(piece)
        if self._n_left >= 0:
            self._pieces.append(piece)


def _check_type(found: CloudAnswer, expected: bytes) -> None:
    if found.content_type != expected:
        raise CloudError(f"its answer is not {expected.decode()}")


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        values = parse_json(data)
    except ValueError as error:
        raise CloudError("its answer is not JSON") from error
    if not isinstance(values, dict):
        raise CloudError("its answer is no JSON object")
    if values.get("error"):
        raise CloudError("it reports an error in place of an answer")
    return values


def _choices(values: dict[str, Any]) -> list[dict[str, Any]]:
    choices = values.get("choices")
    if not (isinstance(choices, list) and all(isinstance(one, dict) for one in choices)):
        raise CloudError("its answer has another form than OpenAI's")
    return choices


def _text(message: object) -> str:
    """Return the text of a message, or of a part of one; empty if it has none."""
    content = message.get("content") if isinstance(message, dict) else None
    return content if isinstance(content, str) else ""


def _dumped(values: dict[str, Any]) -> bytes:
    try:
        return json.dumps(values, separators=(",", ":")).encode()
    except RecursionError as error:  # writing nests deeper than parsing
        raise CloudError("its answer is nested too deeply") from error


def _event(data: bytes) -> Message:
    return {"type": "http.response.body", "body": b"data: %s\n\n" % data, "more_body": True}
