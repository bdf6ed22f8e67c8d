"""A server with keys and low limits, and helpers for tests that use it."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket

from served import ENDLESS, LONG_N_CTX, serving

ADMINISTRATOR, MAIL, NOTES = "sesame", "mail-0123456789abcdef", "notes-0123456789abcdef"
SETTINGS = """
key_file = "keys.toml"
max_queue = 4
max_body_bytes = 16384
max_connections = 12
client_timeout_s = 2
"""


@contextlib.contextmanager
def limited(folder):
    """Start the server; assert afterwards that its log names no key and no internal failure."""
    (folder / "keys.toml").write_text(f'mail = "{MAIL}"\nnotes = "{NOTES}"\n')
    (folder / "keys.toml").chmod(0o600)
    options = {"service": SETTINGS, "key": ADMINISTRATOR, "n_ctx": LONG_N_CTX}
    with serving(folder, "--api_key", ADMINISTRATOR, **options) as server:
        yield server
        log = server.log()
        assert not any(key in log for key in (ADMINISTRATOR, MAIL, NOTES))
        assert "Traceback" not in log


def ask(server, method, path, body=None, key=MAIL, kind="application/json"):  # noqa: PLR0917
    """Send a request and return its status, headers and JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {"Content-Type": kind}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    with contextlib.closing(connection):
        data = body if body is None or isinstance(body, bytes) else json.dumps(body)
        connection.request(method, path, data, headers, encode_chunked=False)
        response = connection.getresponse()
        content = response.read()
        is_json = content and response.headers["content-type"].startswith("application/json")
        return response.status, response.headers, json.loads(content) if is_json else content


def connect(server, data=b""):
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    connection.sendall(data)
    return connection


@contextlib.contextmanager
def busy(server, app):
    """Keep the engine busy with a stream inside the block."""
    stream = app.new_context().stream("Tell me a long story.", **ENDLESS)
    next(stream)
    try:
        yield
    finally:
        stream.close()
        server.wait_until_idle()
