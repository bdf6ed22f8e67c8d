"""Requests that the cloud answers, those that stay here, and what is kept."""

from __future__ import annotations

import json
import ssl
import time
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

import stub_cloud
from asking_cloud import KEY, PATHS, QUESTION, Asking
from stub_cloud import DONE, EVENTS, MODEL, TEXT, StubCloud, event

from llmaas_plugins.chats.exports import Message
from llmaas_plugins.server.exchange import Answer
from llmaas_plugins.server.refusal import Refusal

TLS = Path(__file__).parents[2] / "data" / "tls"


def events_of(body):
    """Return the bodies of a stream's events, which must end as OpenAI's do."""
    assert body.endswith(DONE)
    return [json.loads(part.removeprefix(b"data: ")) for part in body.split(b"\n\n")[:-2]]


# -- what the cloud answers ------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["chat", "completion"])
def test_answers_are_passed_on_with_the_models_name_as_asked(stub, asking, route):
    is_chat = route == "chat"
    assert json.loads(asking.ask(route)) == stub_cloud.completion(is_chat) | {"model": "mine"}
    assert dict(asking.sent[0]["headers"])[b"x-llmaas-answered-by"] == b"cloud"
    found = events_of(asking.ask(route, stream=True))
    assert found == [chunk | {"model": "mine"} for chunk in stub_cloud.chunks(is_chat)]
    assert dict(asking.sent[0]["headers"])[b"x-llmaas-answered-by"] == b"cloud"
    assert {request.target for request in stub.received} == {PATHS[route]}
    assert asking.counts == {"asked": 2, "answered": 2}


def test_only_the_body_is_forwarded(stub, asking):
    headers = [
        (b"authorization", b"Bearer client-key"),
        (b"cookie", b"client-cookie"),
        (b"x-forwarded-for", b"client-address"),
        (b"openai-organization", b"client-organization"),
    ]
    body = {"temperature": 0.5, "seed": 3, "stop": ["ü"], "top_k": 9}
    asking.ask(headers=headers, **body)
    (request,) = stub.received
    assert request.body == {"model": MODEL, "messages": QUESTION} | body
    assert b"client-" not in request.raw
    assert request.headers["authorization"] == f"Bearer {KEY}"
    assert set(request.headers) == {
        "host",
        "user-agent",
        "accept-encoding",
        "content-type",
        "connection",
        "authorization",
        "content-length",
    }


def test_events_are_passed_on_as_they_come(stub, asking):
    """The second event is sent once the client has the first one."""

    def slowly(connection, _request):
        stub_cloud.send(connection, 200, EVENTS)
        for n, chunk in enumerate(stub_cloud.chunks(True)):
            while sum(b"data" in message.get("body", b"") for message in asking.sent) < n:
                time.sleep(0.01)
            connection.sendall(b": comment\r\n\r\n" + event(chunk).replace(b"\n", b"\r\n"))
        connection.sendall(DONE)

    stub.how = slowly
    assert len(events_of(asking.ask(stream=True))) == len(stub_cloud.chunks(True))


def test_a_stream_without_its_last_event_is_whole_if_the_answer_is(stub, asking):
    stub.how = stub_cloud.beginning(stub, then=b"", n=100)
    assert len(events_of(asking.ask(stream=True))) == len(stub_cloud.chunks(True))
    assert asking.counts == {"asked": 1, "answered": 1}


@pytest.mark.parametrize("end", [b"", DONE], ids=["closed", "done"])
def test_a_stream_that_ends_before_a_choice(stub, asking, end):
    usage = stub_cloud.chunks(True)[-1]
    stub.how = stub_cloud.raw(b"HTTP/1.1 200 OK\r\n" + EVENTS + b"\r\n" + event(usage) + end)
    sent = asking.ask(stream=True)
    assert sent.count(b"data: ") == 1 + bool(end)
    assert (DONE in sent) == (asking.refusal is None) == bool(end)


def test_over_tls(monkeypatch):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(TLS / "certificate.pem", TLS / "key.pem")
    with StubCloud(context) as stub:
        assert Asking(stub).reason() == "failed"  # nobody vouches for the certificate
        assert stub.raw == b""
        monkeypatch.setenv("SSL_CERT_FILE", str(TLS / "certificate.pem"))
        assert json.loads(Asking(stub).ask())["model"] == "mine"


# -- what stays here -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "given"),
    [
        ("private", {"app": "diary"}),
        ("private", {"headers": [(b"x-llmaas-cloud", b"never")]}),
        ("private", {"headers": [(b"x-llmaas-cloud", b" Never"), (b"x-llmaas-cloud", b"never")]}),
        ("local_only", {"headers": [(b"x-llmaas-level", b"0.6")]}),
        ("local_only", {"headers": [(b"x-llmaas-slo", b"ttft=300ms")]}),
        ("local_only", {"level": 0.6}),
        ("local_only", {"slo": {"ttft": "1 s"}}),
        ("local_only", {"grammar": 'root ::= "x"'}),
        ("local_only", {"logit_bias": {"5": 1}}),
        ("local_only", {"stream": 1}),
        ("local_only", {"response_format": {"type": "json_object", "schema": {}}}),
    ],
)
def test_requests_that_stay_here(stub, asking, reason, given):
    assert asking.reason(**given) == reason
    assert stub.n_connections == 0
    assert asking.counts == {reason: 1}


@pytest.mark.parametrize("said", [[b"no"], [b"never", b"auto"], [b""], [b"never, auto"]])
def test_a_header_that_might_mean_private_is_not_ignored(stub, asking, said):
    with pytest.raises(Refusal, match="X-LLMaaS-Cloud: expected never"):
        asking.ask(headers=[(b"x-llmaas-cloud", value) for value in said])
    assert stub.n_connections == 0


def test_other_routes_do_not_concern_the_cloud(asking):
    answer = Answer(None)
    for route in ("call", "embedding", "models"):
        scope = {"method": "POST", "headers": []}
        assert not asking.gateway.may_answer(route, "", scope, answer)
    assert answer.cloud == {}


# -- what is kept ----------------------------------------------------------------------------------

EARLIER = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Hello."},
    {"role": "assistant", "content": "Said by the local model."},
]
SAID = [Message("user", QUESTION[0]["content"]), Message("assistant", TEXT)]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_what_the_cloud_said_is_kept_with_consent(asking, stream):
    asking.ask(app="mail", stream=stream)
    asking.ask(app="mail", stream=stream, messages=EARLIER + QUESTION)
    asking.ask(app="other", stream=stream)
    asking.ask(app="", stream=stream)
    asking.ask("completion", app="mail", stream=stream)
    assert asking.kept == [("mail", SAID), ("mail", SAID)]
    assert asking.counts == {"asked": 5, "answered": 5, "kept": 2}


@pytest.mark.parametrize(
    ("stream", "last"), [(False, b'"choices"'), (True, DONE)], ids=["whole", "stream"]
)
def test_an_answer_is_kept_though_the_client_leaves_at_its_last_byte(asking, stream, last):
    asking.ask(app="mail", stream=stream, leaves_at=last)
    assert asking.scope.cancel_called
    assert asking.kept == [("mail", SAID)]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("answer", "question"),
    [
        ({"reason": "length"}, QUESTION),
        ({"reason": "content_filter"}, QUESTION),
        ({"reason": "tool_calls"}, QUESTION),
        ({"text": " "}, QUESTION),
        ({}, [*QUESTION, {"role": "tool", "content": "7", "tool_call_id": "1"}]),
        ({}, [{"role": "user", "content": [{"type": "text", "text": "Look at this:"}]}]),
    ],
)
def test_only_completed_answers_to_plain_texts_are_kept(stub, asking, stream, answer, question):
    def unfinished(connection, _request):
        if stream:
            body = b"".join(map(event, stub_cloud.chunks(True, **{"text": TEXT} | answer))) + DONE
            stub_cloud.send(connection, 200, EVENTS, body)
        else:
            stub_cloud.send_json(connection, 200, stub_cloud.completion(True, **answer))

    stub.how = unfinished
    assert asking.ask(app="mail", stream=stream, messages=question)
    assert asking.kept == []


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_very_long_answers_are_not_kept(stub, asking, stream):
    text = ("w" * 999 + " ") * 1100

    def long(connection, _request):
        if stream:
            body = b"".join(map(event, stub_cloud.chunks(True, text))) + DONE
            stub_cloud.send(connection, 200, EVENTS, body)
        else:
            stub_cloud.send_json(connection, 200, stub_cloud.completion(True, text))

    stub.how = long
    assert len(asking.ask(app="mail", stream=stream)) >= 1_100_000
    assert asking.kept == []


def test_an_answer_that_cannot_be_kept_is_given_nevertheless(asking, caplog):
    def fail(*_):
        raise OSError("no space left on device")

    asking.gateway._keep = fail
    assert asking.ask(app="mail")
    assert asking.ask(app="mail")
    assert asking.counts == {"asked": 2, "answered": 2, "not_kept": 2}
    (record,) = caplog.records
    assert "no space left" in record.getMessage()
