"""A service with OpenAI's API on this machine, which answers and fails as a test wants."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from typing import NamedTuple

MODEL = "large"
TEXT = "Oslo is the capital of Norway."
USAGE = {"prompt_tokens": 9, "completion_tokens": 7, "total_tokens": 16}
DONE = b"data: [DONE]\n\n"
EVENTS = b"Content-Type: text/event-stream; charset=utf-8\r\n"


class Received(NamedTuple):
    """One request, as it came."""

    raw: bytes
    target: str
    headers: dict[str, str]
    body: dict[str, object]


class StubCloud:
    """Listener that hands each request to ``how``.

    Attributes:
        how: Function of the connection and the request.
        received: Requests so far.
        left: Whether a client has closed a connection that ``wait`` watches.
    """

    def __init__(self, tls=None):
        self.how = answer
        self.received = []
        self.left = threading.Event()
        self.n_connections = 0
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open = contextlib.ExitStack()

    @property
    def url(self):
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://localhost:{self._listener.getsockname()[1]}/v1"

    @property
    def raw(self):
        """Everything that was received."""
        return b"".join(request.raw for request in self.received)

    def __enter__(self):
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._open.close()
        self._listener.close()

    def wait(self, connection):
        """Wait until the client closes the connection, or the test ends."""
        with contextlib.suppress(OSError):
            while connection.recv(1 << 16):
                pass
        self.left.set()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.n_connections += 1
                thread = threading.Thread(target=self._serve, args=(connection,))
                thread.start()
                self._open.callback(thread.join)
                self._open.callback(_end, connection)

    def _serve(self, connection):
        with contextlib.suppress(OSError), connection:
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
            with connection:
                request = _read(connection)
                self.received.append(request)
                self.how(connection, request)


def _end(connection):
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _read(connection):
    raw = b""
    while b"\r\n\r\n" not in raw:
        raw += _more(connection)
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    while len(body) < int(headers["content-length"]):
        more = _more(connection)
        raw, body = raw + more, body + more
    return Received(raw, first.split()[1], headers, json.loads(body))


def _more(connection):
    if not (data := connection.recv(1 << 16)):
        raise ConnectionResetError
    return data


# -- what it answers -------------------------------------------------------------------------------


def completion(is_chat, text=TEXT, reason="stop"):
    """Return the body of a whole answer."""
    part = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    choice = {"index": 0, "finish_reason": reason, **part}
    return {"id": "c-1", "model": MODEL, "choices": [choice], "usage": USAGE, "fingerprint": "fp_7"}


def chunks(is_chat, text=TEXT, reason="stop"):
    """Return the bodies of a stream's events: a word each, then the reason, then the usage."""

    def chunk(piece, reason=None):
        part = {"delta": piece and {"content": piece}} if is_chat else {"text": piece}
        return {
            "id": "c-1",
            "model": MODEL,
            "choices": [{"index": 0, "finish_reason": reason} | part],
        }

    words = [f"{word} " for word in text.split()] or [" "]
    words[-1] = words[-1].rstrip() or text
    usage = {"id": "c-1", "model": MODEL, "choices": [], "usage": USAGE}
    return [*map(chunk, words), chunk({} if is_chat else "", reason), usage]


def send(connection, status, headers, body=b""):
    connection.sendall(b"HTTP/1.1 %d Stub\r\n%s\r\n%s" % (status, headers, body))


def send_json(connection, status, values, headers=b""):
    body = json.dumps(values).encode()
    length = b"Content-Length: %d\r\n" % len(body)
    send(connection, status, b"Content-Type: application/json\r\n" + length + headers, body)


def event(values):
    return b"data: %s\n\n" % json.dumps(values).encode()


def answer(connection, request):
    """Answer as the request asks, whole or as a stream."""
    is_chat = "messages" in request.body
    if not request.body.get("stream"):
        send_json(connection, 200, completion(is_chat))
        return
    body = b"".join(map(event, chunks(is_chat))) + DONE
    send(connection, 200, EVENTS + b"Content-Length: %d\r\n" % len(body), body)


def status(code, headers=b""):
    """Return a way to answer with an error that quotes the key and the texts."""

    def refuse(connection, request):
        quoted = f"{request.headers.get('authorization')} {request.body}"
        send_json(connection, code, {"error": {"message": quoted}}, headers)

    return refuse


def raw(data):
    """Return a way to answer with any bytes, and to close."""
    return lambda connection, _: connection.sendall(data)


def beginning(stub, then=None, n=2):
    """Return a way to stream ``n`` events, then ``then``, or to stall if that is None."""

    def begin(connection, request):
        first = chunks("messages" in request.body)[:n]
        send(connection, 200, EVENTS, b"".join(map(event, first)) + (then or b""))
        if then is None:
            stub.wait(connection)

    return begin
