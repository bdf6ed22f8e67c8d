"""Connections of ``llmaas serve`` and browser pages: none blocks the server or gains access."""

from __future__ import annotations

import contextlib
import http.client
import json
import select
import socket
import threading
import time

import pytest
from limited import MAIL, busy, connect
from served import ENDLESS, wait_until

from llmaas_hooks import LlmaasError

pytest.importorskip("fastapi")

CHAT = "/v1/chat/completions"


# -- connections -----------------------------------------------------------------------------------


def test_one_connection_too_many_is_told_so(server):
    wait_until(lambda: server.n_files() > 0)
    with contextlib.ExitStack() as stack:
        answers = []
        for _ in range(20):
            connection = stack.enter_context(connect(server))
            connection.setblocking(False)
            answers.append(connection)
        time.sleep(0.2)
        told = []
        for connection in answers:
            with contextlib.suppress(BlockingIOError):
                told.append(connection.recv(1000))
        assert len(told) >= 8
        assert all(b" 503 " in answer and b"12 connections, the limit" in answer for answer in told)
    wait_until(lambda: _answers(server))


def _answers(server):
    with contextlib.suppress(LlmaasError, OSError):
        return server.status()["queue"] == 0


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HEAD += b"Authorization: Bearer %s\r\n" % MAIL.encode()


WHOLE = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
HALVES = [b"", b"GET /heal", HEAD, HEAD + b"Content-Length: 99\r\n\r\n{"]
HALVES += [HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{"]
HALVES += [WHOLE + half for half in HALVES]  # in one piece, so nothing more arrives


@pytest.mark.parametrize(
    "data",
    [b"hello\r\n\r\n", b"\x16\x03\x01\0\0", WHOLE.replace(b": ", b":\0"), WHOLE + b"\0\0\r\n\r\n"],
)
def test_data_that_is_not_http_is_refused_like_any_request(server, data):
    with connect(server, data) as connection:
        answers = b""
        while piece := connection.recv(10_000):
            answers += piece
    head, _, body = answers.rpartition(b"\r\n\r\n")
    assert b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n" in head
    assert json.loads(body)["error"]["message"] == "Invalid HTTP request received."


@pytest.mark.slow
def test_half_a_request_is_not_waited_for(server):
    """A request must be complete ``client_timeout_s`` after its start, even if bytes trickle in."""
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connect(server, half)) for half in HALVES]
        for connection in connections[1:]:
            # the server may have closed the first ones already
            with contextlib.suppress(ConnectionError):
                threading.Event().wait(0.2)
                connection.sendall(b"x")
        for connection in connections:
            with contextlib.suppress(ConnectionError):
                while connection.recv(1000):
                    pass
    assert server.status()["queue"] == 0


@pytest.mark.slow
def test_who_does_not_read_is_not_waited_for(server):
    with connect(server) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.sendall(WHOLE.replace(b"/health", b"/openapi.json") * 300)  # 10 MB of answers
        poll = select.poll()
        poll.register(connection, 0)
        assert poll.poll(20_000)[0][1] & select.POLLHUP


@pytest.mark.parametrize("held", [b"", WHOLE[:20], HALVES[3], WHOLE + HALVES[3]])
def test_who_shows_no_key_keeps_nobody_out(server, mail, request_, held):
    context = mail.new_context()
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(contextlib.closing(context.stream("Why?", **ENDLESS)))
        next(stream)
        for _ in range(30):
            stack.enter_context(connect(server, held))
            assert request_("GET", "/v1/llmaas/apps/mail/contexts")[0] == 200
        next(stream)  # an answer that a client waits for continues
    server.wait_until_idle()


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "PUT", "PATCH", "TRACE", "BREW"])
def test_other_methods(server, mail, request_, method):
    with busy(server, mail):  # these requests do not need the engine
        for path in (CHAT, "/v1/models", "/health"):
            is_probe = (method, path) == ("HEAD", "/health")
            assert request_(method, path)[0] == (200 if is_probe else 405)


def test_an_upgrade_is_an_ordinary_request(server):
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    with connect(server, WHOLE[:-2] + upgrade + b"\r\n") as connection:
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize(
    "request_line",
    [b"GET /" + b"x" * 100_000 + b" HTTP/1.1", b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000, b"\0"],
)
def test_heads_that_are_too_long_or_none(server, request_line):
    with connect(server, request_line + b"\r\n\r\n") as connection:
        assert connection.recv(1000).startswith(b"HTTP/1.1 400 ")


def test_a_request_sent_ahead_has_its_own_headers_alone(server):
    """A request begins after the answer to the previous one, and shares nothing with it."""
    asked = [("Write to Ana that I am late. " * 4, b"X-LLMaaS-Without: kv_chunks\r\n")]
    asked.append(("Write to Bob that I am early. " * 4, b""))
    data = b""
    for prompt, header in asked:
        body = json.dumps({"prompt": prompt, "max_tokens": 1}).encode()
        data += HEAD + header + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    n_saves = server.kv()["saves"]
    with connect(server, data) as connection:
        answers = b""
        while answers.count(b"usage") < len(asked):
            answers += connection.recv(1000)
    wait_until(lambda: server.kv()["saves"] == n_saves + 1)


# -- pages in browsers -----------------------------------------------------------------------------


def test_pages_of_others_are_kept_out(server):
    evil = {"Origin": "https://evil.example", "Access-Control-Request-Method": "DELETE"}
    for method, path, headers, expected in (
        ("OPTIONS", "/v1/llmaas/apps/mail/contexts/x", evil, 403),
        ("GET", "/v1/llmaas/apps/mail/contexts", evil, 403),
        ("GET", "/health", {"Host": "rebound.evil.example"}, 403),
        ("GET", "/health", {"Origin": f"http://localhost:{server.port}"}, 403),  # another name
        ("GET", "/health", {"Origin": f"http://127.0.0.1:{server.port}"}, 200),
    ):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            assert answer.status == expected
            assert not [name for name in answer.headers if name.lower().startswith("access-")]


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "expected"), [("wrong", 401), (MAIL, 413)])
def test_a_refusal_arrives_though_the_body_was_still_being_sent(server, key, expected):
    body = b"x" * 300_000
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Authorization: Bearer {key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with connect(server, head.encode()) as connection:
        threading.Event().wait(0.1)  # long enough for a refusal
        connection.sendall(body)
        assert b" %d " % expected in connection.recv(100)


@pytest.mark.parametrize("close", ["", "Connection: close\r\n"])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ("Authorization: Bearer wrong\r\nContent-Length: 300", 401),
        ("Host: evil.example.org\r\nContent-Length: 300", 403),
        (f"Authorization: Bearer {MAIL}\r\nContent-Length: 300000", 413),
        (f"Authorization: Bearer {MAIL}\r\nContent-Length: 300\r\nContent-Type: text/plain", 415),
    ],
)
def test_a_refusal_arrives_though_the_body_is_never_sent(server, fields, expected, close):
    fields += "" if "Type" in fields else "\r\nContent-Type: application/json"
    fields += "" if "Host" in fields else "\r\nHost: localhost"
    head = f"POST {CHAT} HTTP/1.1\r\n{close}{fields}\r\n\r\n"
    with connect(server, head.encode()) as connection:
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert response.status == expected
        assert json.loads(response.read())["error"]["message"]


def test_a_connection_goes_on_after_a_refusal(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {"Authorization": f"Bearer {MAIL}", "Content-Type": "application/json"}
    with contextlib.closing(connection):
        for body, expected in ((b"x" * 20_000, 413), (b"[]", 400), (b'{"input": "Hi"}', 200)):
            connection.request("POST", "/extras/tokenize", body, headers)
            response = connection.getresponse()
            response.read()
            assert response.status == expected
