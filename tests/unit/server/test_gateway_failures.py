"""A cloud that fails, stalls, or sends something else than answers."""

from __future__ import annotations

import logging
import time

import pytest

pytest.importorskip("fastapi")

import stub_cloud
from asking_cloud import KEY, Asking
from stub_cloud import DONE, EVENTS, StubCloud, event

LONG = b"x" * 70_000
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
FAILURES = {
    "refuses": stub_cloud.status(503),
    "too many": stub_cloud.status(429, b"Retry-After: 7\r\n"),
    "wrong key": stub_cloud.status(401),
    "redirects": stub_cloud.status(307, b"Location: http://localhost:1/v1\r\n"),
    "hangs up": stub_cloud.raw(b""),
    "another protocol": stub_cloud.raw(b"SSH-2.0-OpenSSH_9.6\r\n"),
    "endless head": stub_cloud.raw(b"HTTP/1.1 200 OK\r\nX: " + LONG),
    "closes early": stub_cloud.raw(HEAD + b"Content-Length: 100\r\n\r\n{"),
    "wrong length": stub_cloud.raw(HEAD + b"Content-Length: -1\r\n\r\n{}"),
    "no JSON": stub_cloud.raw(HEAD + b"\r\n<html>"),
    "deep JSON": stub_cloud.raw(HEAD + b"\r\n" + b"[" * 100_000),
    "a list": stub_cloud.raw(HEAD + b"\r\n[]"),
    "no choices": stub_cloud.raw(HEAD + b'\r\n{"choices": []}'),
    "choices without an end": stub_cloud.raw(
        b"HTTP/1.1 200 OK\r\n" + EVENTS + b'\r\ndata: {"choices": [{"index": 4711}]}\n\n'
    ),
    "strange choices": stub_cloud.raw(HEAD + b'\r\n{"choices": [7]}'),
    "an error": stub_cloud.raw(HEAD + b'\r\n{"error": {"message": "no"}, "choices": [{}]}'),
    "compressed": stub_cloud.raw(HEAD + b"Content-Encoding: gzip\r\n\r\n{}"),
    "endless": stub_cloud.raw(HEAD + b"\r\n" + b" " * (5 << 20)),
    "a page": stub_cloud.raw(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<html>"),
    "a stream of nothing": stub_cloud.raw(
        b"HTTP/1.1 200 OK\r\n" + EVENTS + b"\r\n: comment\n\nevent: ping\ndata: {}\n\n"
    ),
    "an empty stream": stub_cloud.raw(b"HTTP/1.1 200 OK\r\n" + EVENTS + b"\r\n" + DONE),
    "a stream of an error": stub_cloud.raw(
        b"HTTP/1.1 200 OK\r\n" + EVENTS + b'\r\nevent: error\ndata: {"error": "no"}\n\n'
    ),
    "an endless event": stub_cloud.raw(
        b"HTTP/1.1 200 OK\r\n" + EVENTS + b"\r\ndata: " + b" " * (2 << 20)
    ),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("how", FAILURES)
def test_the_local_model_answers_what_the_cloud_fails(stub, asking, caplog, how, stream):
    stub.how = FAILURES[how]
    assert asking.reason(stream=stream) == "failed"
    assert asking.counts == {"asked": 1, "failed": 1}
    assert asking.reason(stream=stream) == "left_alone"
    assert len(stub.received) == 1
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "answered locally: " in record.getMessage()
    assert "Norway" not in caplog.text  # the stub's errors quote the request
    assert KEY not in caplog.text
    stub.how = stub_cloud.answer
    asking.now_s += 5.1
    assert asking.ask(stream=stream) is not None


def test_what_is_wrong_with_the_configuration_is_said(stub, asking, caplog):
    hints = {401: "the variable KEY", 403: "the variable KEY", 404: "cloud.base_url", 308: "redir"}
    for code, hint in hints.items():
        stub.how = stub_cloud.status(code)
        asking.reason()
        assert f"HTTP status {code}; " in caplog.records[-1].getMessage()
        assert hint in caplog.records[-1].getMessage()
        stub.how = stub_cloud.answer
        asking.now_s += 5.1
        asking.ask()


def test_a_cloud_that_cannot_be_reached():
    with StubCloud() as stub:
        asking = Asking(stub)
    assert asking.reason() == "failed"


@pytest.mark.parametrize("code", [400, 404, 405, 413, 422])
def test_a_refused_request_keeps_no_other_one_from_the_cloud(stub, asking, caplog, code):
    stub.how = stub_cloud.status(code)
    assert asking.reason() == asking.reason() == "refused"
    assert asking.counts == {"asked": 2, "refused": 2}
    (record,) = caplog.records
    assert record.getMessage().startswith("the cloud refuses a request")
    stub.how = stub_cloud.answer
    assert asking.ask() is not None


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\n" + EVENTS])
def test_a_cloud_that_stalls_before_its_answer(stub, sent, stream):
    def stall(connection, _request):
        connection.sendall(sent + (b"\r\n: comment\n\n" if EVENTS in sent else b""))
        stub.wait(connection)

    stub.how = stall
    asking = Asking(stub, timeout_s=0.3)
    assert asking.reason(stream=stream) == "failed"
    assert stub.left.wait(20)


def test_bytes_that_trickle_in_are_no_answer(stub):
    def trickle(connection, _request):
        connection.sendall(HEAD + b"\r\n")
        while True:
            connection.sendall(b" ")
            time.sleep(0.02)

    stub.how = trickle
    assert Asking(stub, timeout_s=0.3).reason() == "failed"


BROKEN = {
    "closes": b"",
    "sends no JSON": b"data: {\n\n",
    "reports an error": event({"error": {"message": "overloaded"}}),
    "sends an event without end": b"data: " + b" " * (2 << 20),
    "stalls": None,
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_failure_in_the_middle_of_a_stream_is_told(stub, how):
    stub.how = stub_cloud.beginning(stub, then=BROKEN[how])
    asking = Asking(stub, timeout_s=0.5 if how == "stalls" else 20)
    sent = asking.ask(stream=True, app="mail")
    assert sent.count(b"data: ") == 2
    assert DONE not in sent
    assert asking.refusal.status == 502
    assert b"in the middle of its answer" in asking.refusal.event()
    assert asking.counts == {"asked": 1, "broken_off": 1}
    assert asking.kept == []
    assert asking.reason() == "left_alone"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_ends_the_clouds_work(stub, asking, stream):
    stub.how = stub_cloud.status(503)
    assert asking.reason() == "failed"
    asking.now_s += 5.1  # the next request is the only one that tries the cloud
    stub.how = stub_cloud.beginning(stub) if stream else lambda connection, _: stub.wait(connection)
    with pytest.raises(TimeoutError):
        asking.ask(stream=stream, leaves_after_s=0.3)
    assert stub.left.wait(20)
    stub.how = stub_cloud.answer
    assert asking.ask() is not None  # it tries in its place


@pytest.mark.parametrize("depth", range(100, 1100, 50))
def test_no_depth_of_json_is_an_exception(stub, asking, depth):
    body = b'{"choices": [{"x": ' + b"[" * depth + b"]" * depth + b"}]}"
    stub.how = stub_cloud.raw(HEAD + b"\r\n" + body)
    if asking.ask() is None:
        assert asking.counts == {"asked": 1, "failed": 1}
