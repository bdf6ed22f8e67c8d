"""Numbers of absurd sizes in request bodies are refused, whatever the field."""

from __future__ import annotations

import json
import re

import pytest

pytest.importorskip("fastapi")

from pydantic import ValidationError

from llmaas_plugins.server.body_checks import _BODIES, check_body
from llmaas_plugins.server.refusal import Refusal
from llmaas_plugins.server.routes import CallBody

COMMON = {"logit_bias_type": "tokens"}  # input ids are compared with the model's
BODIES = {
    "chat": {"messages": [{"role": "user", "content": "Hi"}]} | COMMON,
    "completion": {"prompt": "Hi"} | COMMON,
}
ABSURD = ("1" * 400, str(2**63), str(2**70), str(-(2**70)), "1e308", "-1e308", "1e400", "NaN")
ABSURD += ("-Infinity",)


def numeric(model):
    """Yield the names of a model's fields that are numbers."""
    for name, field in model.model_fields.items():
        if re.fullmatch(
            r"<class '(int|float)'>|.*\[(int|float)\]|(int|float) \| None", str(field.annotation)
        ):
            yield name


FIELDS = [(route, name) for route in BODIES for name in numeric(_BODIES[route])]


@pytest.mark.parametrize(("route", "name"), FIELDS)
@pytest.mark.parametrize("number", ABSURD)
def test_fields_of_openai_routes(route, name, number):
    body = json.dumps(BODIES[route])[:-1] + f', "{name}": {number}}}'
    with pytest.raises(Refusal) as caught:
        check_body(route, body.encode())
    assert "\n" not in str(caught.value)
    check_body(route, json.dumps(BODIES[route]).encode())


@pytest.mark.parametrize(
    ("route", "body", "message"),
    [
        ("completion", {"model": "x", "prmpt": "Hi"}, "prompt: .* found 'model', 'prmpt'"),
        ("chat", {"mesages": []}, "messages: expected this field, found 'mesages'"),
        ("chat", {}, "messages: expected this field, found none"),
        ("embedding", {"x" * 99: 1}, "input: expected this field, found 'x{40}'"),
    ],
)
def test_a_field_that_a_request_is_about_is_missed(route, body, message):
    with pytest.raises(Refusal, match=message):
        check_body(route, json.dumps(body).encode())


def test_other_fields_that_nobody_knows_are_ignored():
    """Clients of OpenAI's API send many, such as ``stream_options`` and ``store``."""
    check_body("chat", json.dumps(BODIES["chat"] | {"store": False, "chat_id": "1"}).encode())


@pytest.mark.parametrize("name", list(numeric(CallBody)))
@pytest.mark.parametrize("number", ABSURD)
def test_fields_of_our_own_routes(name, number):
    with pytest.raises(ValidationError, match=name):
        CallBody.model_validate({"prompt": "Hi", name: json.loads(number)})


@pytest.mark.parametrize(
    ("route", "name"), [("chat", "n"), ("completion", "n"), ("completion", "best_of")]
)
def test_one_answer_to_a_request(route, name):
    for number in (None, 1):
        check_body(route, json.dumps(BODIES[route] | {name: number}).encode())
    for number in (0, 2, -1):
        with pytest.raises(Refusal, match=f"{name}: expected 1, the number of answers"):
            check_body(route, json.dumps(BODIES[route] | {name: number}).encode())


def test_the_fields_are_found():
    assert {name for _, name in FIELDS} >= {"max_tokens", "temperature", "seed", "top_p", "n"}
    assert set(numeric(CallBody)) >= {"max_tokens", "temperature", "seed", "top_p"}
