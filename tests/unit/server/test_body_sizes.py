"""Bodies with many values are checked in little memory, whatever is wrong with them."""

from __future__ import annotations

import json
import tracemalloc

import pytest

pytest.importorskip("fastapi")

from llmaas_plugins.server.body_checks import check_body
from llmaas_plugins.server.body_values import MOST_ENTRIES
from llmaas_plugins.server.refusal import Refusal

MESSAGE = {"role": "user", "content": "Hi"}
CHAT = {
    "messages": [MESSAGE],
    "logit_bias_type": "tokens",
}  # input ids are compared with the model's
WRONG_PART, WRONG_CALL = {"type": "text"}, {"function": {}}
MANY = "has more than 32768 values, the limit"
MOST_BYTES = 64 << 20


def refusal(body, route="chat"):
    """Return why a body is refused, which must take little memory."""
    raw = json.dumps(body).encode()
    tracemalloc.start()
    try:
        with pytest.raises(Refusal) as caught:
            check_body(route, raw)
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()
    assert caught.value.status == 400
    return str(caught.value)


@pytest.mark.parametrize(
    ("surplus", "message"),
    [
        ({"messages": [{"role": "x"}] * 60_000}, MANY),
        ({"messages": [{"role": "x"}] * 15_000}, "messages.0."),
        ({"messages": [MESSAGE] * 9000 + [{"role": "x"}]}, "messages.9000."),
        ({"messages": [{"role": "user", "content": [WRONG_PART] * 2000}] * 7}, "messages.0."),
        ({"messages": [{"role": "assistant", "tool_calls": [WRONG_CALL] * 2000}]}, "messages.0."),
        ({"messages": [{"role": "user", "content": [[]] * 50_000}]}, "content: at most 4096"),
        ({"messages": [1] * 500_000}, MANY),
        ({"tools": [{}] * 300_000}, "tools: at most 4096 entries, found 300000"),
        ({"stop": [1] * 300_000}, "stop: at most 4096 entries"),
        ({f"k{i}": 1 for i in range(80_000)}, "The body: at most 4096 entries"),
    ],
)
def test_wrong_bodies(surplus, message):
    assert message in refusal(CHAT | surplus)


@pytest.mark.parametrize("route", ["call", "contexts"])
def test_bodies_of_our_own_routes(route):
    assert "at most 4096 entries" in refusal({f"k{i}": 1 for i in range(80_000)}, route)
    assert "at most 4096 entries" in refusal({"prompt": "a", "stop": [1] * 80_000}, route)


def test_messages_of_other_routes_are_no_chat():
    check_body(
        "completion",
        json.dumps({"prompt": "Hi", "messages": [1], "logit_bias_type": "tokens"}).encode(),
    )


def test_long_chats_and_lists_are_taken():
    check_body("chat", json.dumps(CHAT | {"messages": [MESSAGE] * 10_000}).encode())
    parts = [{"type": "text", "text": "Hi"}] * MOST_ENTRIES
    messages = [{"role": "user", "content": parts}] * 2
    check_body("chat", json.dumps(CHAT | {"messages": messages}).encode())
    found = {"name": "f", "parameters": {}}
    tools = [{"type": "function", "function": found}] * MOST_ENTRIES
    check_body("chat", json.dumps(CHAT | {"tools": tools}).encode())


def test_a_mistake_elsewhere_is_named_beside_many_messages():
    body = CHAT | {"messages": [MESSAGE] * 5000, "max_tokens": "many"}
    assert refusal(body).startswith("max_tokens: ")


@pytest.mark.parametrize(
    ("route", "name", "wrong", "least", "most"),
    [
        ("completion", "logprobs", 101, 0, 100),
        ("chat", "top_logprobs", 101, 0, 100),
        ("chat", "max_tokens", -5, -1, (1 << 31) - 1),
    ],
)
def test_ranges_are_named_as_they_are(route, name, wrong, least, most):
    body = CHAT if route == "chat" else {"prompt": "Hi", "logit_bias_type": "tokens"}
    assert refusal(body | {name: wrong}, route) == f"{name}: must be from {least} to {most}"
    for right in (least, 100):
        check_body(route, json.dumps(body | {name: right}).encode())


@pytest.mark.parametrize("route", ["chat", "completion"])
def test_a_negative_temperature(route):
    body = CHAT if route == "chat" else {"prompt": "Hi", "logit_bias_type": "tokens"}
    assert refusal(body | {"temperature": -0.5}, route).startswith(
        "temperature: must be at least 0"
    )
