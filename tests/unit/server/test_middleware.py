"""The class of routes of a path: an unclassified path would need no key and have no limit."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import anyio
import pytest

pytest.importorskip("fastapi")

from fastapi import FastAPI
from llama_cpp.server import app as server
from starlette.requests import ClientDisconnect
from starlette.routing import compile_path

from llmaas_hooks import NO_PROMISE, Limit, Promise
from llmaas_plugins.config import ServiceConfig
from llmaas_plugins.server import middleware
from llmaas_plugins.server.admission import Admission
from llmaas_plugins.server.api_keys import ApiKeys
from llmaas_plugins.server.application import explain_refusals
from llmaas_plugins.server.exchange import Answer
from llmaas_plugins.server.metrics import Metrics
from llmaas_plugins.server.middleware import RequestMiddleware, route_of
from llmaas_plugins.server.origins import OriginCheck

APP = "/v1/llmaas/apps/mail/contexts"


@pytest.mark.parametrize(
    ("path", "name", "owner"),
    [
        ("/v1/chat/completions", "chat", ""),
        ("/v1/completions", "completion", ""),
        ("/v1/engines/copilot-codex/completions", "completion", ""),
        ("/v1/embeddings", "embedding", ""),
        ("/v1/models", "models", ""),
        ("/extras/tokenize", "tokens", ""),
        ("/extras/tokenize/count", "tokens", ""),
        ("/extras/detokenize", "tokens", ""),
        (APP, "contexts", "mail"),
        (f"{APP}/abc", "contexts", "mail"),
        (f"{APP}/abc/call", "call", "mail"),
        (f"{APP}/abc/call\n", "call", "mail"),  # the server's patterns end so, too
        (f"{APP}/abc/other", "other", ""),
        ("/v1/llmaas/status", "status", ""),
        ("/metrics", "metrics", ""),
        ("/health", "health", ""),
        ("/docs", "docs", ""),
        ("/openapi.json", "docs", ""),
        ("/", "page", ""),
        ("/page/page.css", "page", ""),
        ("/page/a/b", "other", ""),
        ("/v1/llmaas/contexts", "overview", ""),
        ("/v1/chat/completions/", "other", ""),
    ],
)
def test_routes(path, name, owner):
    route, found = route_of(path)
    assert (route.name, found) == (name, owner)


def test_every_route_of_the_server_waits_for_its_turn():
    for route in server.router.routes:
        assert compile_path(route.path)[2] == {}  # no parameters: the path is the whole route
        assert route_of(route.path)[0].waits, route.path


def test_what_an_app_may_not_use_is_the_administrators():
    assert [route_of(path)[0].opens_to for path in ("/metrics", "/v1/llmaas/status", "/new")] == [
        "administrator"
    ] * 3


@pytest.mark.parametrize(
    ("method", "path", "is_promised"),
    [
        ("POST", "/v1/completions", True),
        ("GET", "/v1/models", False),
        ("DELETE", f"{APP}/abc", False),
        ("POST", f"{APP}/abc/call", True),
    ],
)
def test_only_calls_with_a_first_token_are_promised_one(monkeypatch, method, path, is_promised):
    """Others would be due before calls that were promised one, which would leave them room."""
    promise, entered = Promise(Limit.of("150 ms")), []
    monkeypatch.setattr(middleware, "configured_promise", lambda _: promise)
    monkeypatch.setattr("llmaas_plugins.server.body_checks.server_engine", Mock())

    class Recording(Admission):
        def enter(self, app, promise=NO_PROMISE, *, context=""):
            entered.append(promise)
            return super().enter(app, promise, context=context)

    async def app(_, receive, send):
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def ask():
        made = RequestMiddleware(
            app, admission=Recording(ServiceConfig()), keys=ApiKeys(None, {}),
            origins=OriginCheck(None, (), ()), metrics=Mock(), grammars=Mock(), gateway=None,
            max_body_bytes=1024,
        )  # fmt: skip
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": method, "path": path, "headers": headers}
        sent, messages = [], [{"type": "http.request", "body": b'{"prompt": "Hello"}'}]

        async def receive():
            return messages.pop() if messages else await asyncio.Future()

        async def send(message):
            sent.append(message)

        await made(scope, receive, send)
        return sent[0]["status"]

    assert asyncio.run(ask()) == 200
    assert [one.ttft for one in entered] == [promise.ttft if is_promised else None]


def test_what_fails_in_a_route_is_told_in_the_form_of_a_refusal():
    pytest.importorskip("httpx")
    from starlette.testclient import TestClient

    app = FastAPI()
    explain_refusals(app)

    @app.get("/")
    def fail():
        raise OSError("no room")

    answer = TestClient(app, raise_server_exceptions=False).get("/")
    error = answer.json()["error"]
    assert (answer.status_code, error["message"]) == (500, "no room")
    assert error["type"] == "server_error"


def test_a_client_that_leaves_at_the_moment_of_its_turn_is_counted_once():
    """Its call has the engine when it ends, but has asked it nothing."""

    async def story():
        admission = Admission(ServiceConfig(max_queue=4))
        metrics, served = Metrics(admission), []

        async def serve(scope, receive, send):
            served.append(scope)

        async def receive():
            await anyio.sleep_forever()

        async def send(_):
            pass

        middleware = RequestMiddleware(
            serve,
            admission=admission,
            keys=None,
            origins=None,
            metrics=metrics,
            grammars=None,
            gateway=None,
            max_body_bytes=0,
        )
        first, call = admission.enter("mail"), admission.enter("mail", Promise(Limit(0.5)))
        call.came_s -= 0.6
        scope = {"type": "http", "path": "/v1/completions", "headers": []}

        async def ask():
            with pytest.raises(ClientDisconnect):
                await middleware._call(call, scope, b"", receive, Answer(send))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            call.end()  # as the watcher of its client does
            admission.leave(first)
            assert admission.running is call
        assert served == []
        assert admission.report()["missed_in_queue"] == 1
        assert b"llmaas_missed_in_queue 1.0" in metrics.as_text()
        assert len(admission) == 0

    anyio.run(story)
