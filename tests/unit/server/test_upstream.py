"""Mistakes of clients that llama_cpp.server would call its own."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi")

from llama_cpp.server.errors import RouteErrorHandler
from llama_cpp.server.types import CreateCompletionRequest

from llmaas_plugins.chats.text_limit import TextTooLongError
from llmaas_plugins.server.upstream import explain_mistakes


@pytest.fixture
def explain(monkeypatch):
    original = RouteErrorHandler.error_message_wrapper
    monkeypatch.setattr(RouteErrorHandler, "error_message_wrapper", original)
    patterns = dict(RouteErrorHandler.pattern_and_formatters)
    monkeypatch.setattr(RouteErrorHandler, "pattern_and_formatters", patterns)
    explain_mistakes()
    route = object.__new__(RouteErrorHandler)  # it needs nothing of a route
    return route.error_message_wrapper


def fail():
    raise TextTooLongError("Divide this text.")


@pytest.mark.parametrize("body", [None, CreateCompletionRequest(prompt="x")])
def test_a_text_that_is_too_slow_to_tokenize_whatever_its_message(explain, body):
    with pytest.raises(TextTooLongError) as caught:
        fail()
    status, found = explain(caught.value, body)
    assert status == 400
    assert found["message"] == "Divide this text."


def test_tokens_that_end_inside_a_character(explain):
    with pytest.raises(UnicodeDecodeError) as caught:
        "☃".encode()[:2].decode()
    status, found = explain(caught.value)
    assert status == 400
    assert found["message"].startswith("tokens: their text begins or ends inside a character")


def test_text_of_a_completion_that_cannot_be_decoded_is_not_said_to_be_of_tokens(explain):
    with pytest.raises(UnicodeDecodeError) as caught:
        "☃".encode()[:2].decode()
    status, found = explain(caught.value, CreateCompletionRequest(prompt="x"))
    assert status == 500
    assert "tokens:" not in found["message"]
