"""Requests over TLS are answered as others are."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from llmaas_plugins.config import ServiceConfig
from llmaas_plugins.server.admission import Admission
from llmaas_plugins.server.api_keys import ApiKeys
from llmaas_plugins.server.http_server import Server
from llmaas_plugins.server.listening import listening_on_port, tls_context

TLS = Path(__file__).parents[2] / "data" / "tls"
HOST = "localhost"
KEY = "sesame"
MOST = 4
TIMEOUT_S = 1.0


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

        def serve(**limits):
            config = ServiceConfig(**limits)
            sockets = stack.enter_context(listening_on_port("127.0.0.1", 0))
            keys = ApiKeys(KEY, {})
            options = {"lifespan": "off", "log_config": None}
            tls = tls_context(str(TLS / "key.pem"), str(TLS / "certificate.pem"))
            server = Server(echo, Admission(config), keys, config, tls=tls, **options)
            thread = threading.Thread(target=server.run, args=(sockets,))
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.handle_exit)
            return sockets[0].getsockname()[1]

        serve.stop = stack.close
        yield serve


def trusting():
    return ssl.create_default_context(cafile=TLS / "certificate.pem")


def test_requests_one_after_another(serve):
    connection = http.client.HTTPSConnection(HOST, serve(), timeout=60, context=trusting())
    for body in (b"", b"x" * 1_000_000):
        connection.request("POST", "/", body)
        assert connection.getresponse().read() == b"https" + body
    connection.close()


def asked(port, body=b"hello"):
    """Return the answer to a request on a new connection."""
    connection = http.client.HTTPSConnection(HOST, port, timeout=60, context=trusting())
    with contextlib.closing(connection):
        connection.request("POST", "/", body)
        return connection.getresponse().read()


def silent(stack, port, n):
    """Return ``n`` connections that say nothing."""
    address = ("127.0.0.1", port)
    return [stack.enter_context(socket.create_connection(address, timeout=60)) for _ in range(n)]


def hello():
    """Return the first message of a client's handshake."""
    written = ssl.MemoryBIO()
    client = trusting().wrap_bio(ssl.MemoryBIO(), written, server_hostname=HOST)
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return written.read()


def is_closed(connection, seconds):
    """Return whether the server closes a connection within some seconds."""
    connection.settimeout(seconds)
    with contextlib.suppress(ConnectionError):
        try:
            while connection.recv(1 << 16):
                pass
        except TimeoutError:
            return False
    return True


def test_connections_without_a_handshake_count_for_the_limit(serve):
    with contextlib.ExitStack() as stack:
        port = serve(max_connections=MOST)  # and 30 s for each step
        held = silent(stack, port, MOST + 2)
        assert all(is_closed(one, 20) for one in held[:2])  # the new ones took their places
        assert not any(is_closed(one, 0.1) for one in held[2:])
        assert asked(port) == b"httpshello"
        assert is_closed(held[2], 20)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [0, 1, 200], ids=["silent", "one byte", "most of a hello"])
def test_a_handshake_must_end_in_time(serve, sent):
    with contextlib.ExitStack() as stack:
        port = serve(max_connections=MOST, client_timeout_s=TIMEOUT_S)
        started = time.monotonic()
        held = silent(stack, port, MOST)
        for one in held:
            one.sendall(hello()[:sent])
        assert all(is_closed(one, 20) for one in held)
        assert TIMEOUT_S / 2 < time.monotonic() - started < TIMEOUT_S + 5
        assert asked(port) == b"httpshello"


@pytest.mark.slow
def test_a_handshake_byte_by_byte_must_end_in_time(serve):
    port = serve(client_timeout_s=TIMEOUT_S)
    with contextlib.ExitStack() as stack:
        (held,) = silent(stack, port, 1)
        started, said = time.monotonic(), hello()
        with contextlib.suppress(ConnectionError):
            for byte in said:  # all of them would take 10 s and more
                held.sendall(bytes([byte]))
                time.sleep(TIMEOUT_S / 20)
        assert time.monotonic() - started < TIMEOUT_S + 5
    assert asked(port) == b"httpshello"


@pytest.mark.slow
def test_a_client_that_finishes_its_handshake_and_is_silent(serve):
    port = serve(client_timeout_s=TIMEOUT_S)
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as raw,
        trusting().wrap_socket(raw, server_hostname=HOST) as held,
    ):
        assert is_closed(held, 20)


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\0" * 1000])
def test_what_is_no_tls_is_closed_at_once(serve, sent):
    port = serve()
    with contextlib.ExitStack() as stack:
        (held,) = silent(stack, port, 1)
        held.sendall(sent)
        assert is_closed(held, 20)
    assert asked(port) == b"httpshello"


def test_handshakes_keep_out_nobody_who_has_a_key(serve):
    port = serve(max_connections=MOST)
    connection = http.client.HTTPSConnection(HOST, port, timeout=60, context=trusting())
    with contextlib.ExitStack() as stack:
        stack.callback(connection.close)
        connection.putrequest("POST", "/")
        connection.putheader("Authorization", f"Bearer {KEY}")
        connection.putheader("Content-Length", "10")
        connection.endheaders(b"first")
        silent(stack, port, 5 * MOST)
        assert asked(port) == b"httpshello"
        connection.send(b"then ")
        assert connection.getresponse().read() == b"httpsfirstthen "


def test_what_arrives_with_the_end_of_the_handshake_is_not_lost(serve):
    """The client's last message and its request arrive together."""
    port = serve()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting().wrap_bio(incoming, outgoing, server_hostname=HOST)
    with contextlib.ExitStack() as stack:
        (raw,) = silent(stack, port, 1)
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                raw.sendall(outgoing.read())
                incoming.write(raw.recv(1 << 16))
        client.write(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\nhi")
        raw.sendall(outgoing.read())
        answer = b""
        while b"httpshi" not in answer:
            incoming.write(raw.recv(1 << 16))
            with contextlib.suppress(ssl.SSLWantReadError):
                while True:
                    answer += client.read(1 << 16)


def test_the_server_ends_while_clients_shake_hands(serve):
    port = serve()
    with contextlib.ExitStack() as stack:
        held = silent(stack, port, MOST)
        held[0].sendall(hello()[:100])
        assert asked(port) == b"httpshello"  # so the others were accepted
        started = time.monotonic()
        serve.stop()
        assert time.monotonic() - started < 2  # seconds that answers under way would get
        assert all(is_closed(one, 20) for one in held)
