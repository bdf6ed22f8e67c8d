"""The class of routes of a path: an unclassified path would need no key and have no limit."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi")

from fastapi import FastAPI
from llama_cpp.server import app as server
from starlette.routing import compile_path

from llmaas_plugins.server.application import explain_refusals
from llmaas_plugins.server.middleware import route_of

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
