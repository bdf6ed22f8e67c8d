"""Requests over TLS are answered as others are."""

from __future__ import annotations

import contextlib
import http.client
import ssl
import threading
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from llmaas_plugins.config import ServiceConfig
from llmaas_plugins.server.admission import Admission
from llmaas_plugins.server.api_keys import ApiKeys
from llmaas_plugins.server.http_server import Server
from llmaas_plugins.server.listening import listening_on_port

TLS = Path(__file__).parents[2] / "data" / "tls"
CERTIFICATE = {"ssl_keyfile": str(TLS / "key.pem"), "ssl_certfile": str(TLS / "certificate.pem")}
HOST = "localhost"


async def echo(scope, receive, send):
    """Answer with the scheme and the body of a request."""
    body, more = b"", scope["type"] == "http"
    while more:
        message = await receive()
        body, more = body + message["body"], message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["scheme"].encode() + body})


@pytest.fixture
def serve():
    """Return a function that serves ``echo`` over TLS and returns the port."""
    with contextlib.ExitStack() as stack:

        def serve():
            config = ServiceConfig()
            sockets = stack.enter_context(listening_on_port("127.0.0.1", 0))
            keys = ApiKeys("administrator's key", {})
            options = {"lifespan": "off", "log_config": None, **CERTIFICATE}
            server = Server(echo, Admission(1), keys, config, **options)
            thread = threading.Thread(target=server.run, args=(sockets,))
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.handle_exit)
            return sockets[0].getsockname()[1]

        yield serve


def trusting():
    return ssl.create_default_context(cafile=TLS / "certificate.pem")


def test_requests_one_after_another(serve):
    connection = http.client.HTTPSConnection(HOST, serve(), timeout=60, context=trusting())
    for body in (b"", b"x" * 1_000_000):
        connection.request("POST", "/", body)
        assert connection.getresponse().read() == b"https" + body
    connection.close()
