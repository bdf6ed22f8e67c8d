"""Checks of request bodies that the server would answer with 500, or that would crash it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from llama_cpp.server.types import (
    CreateChatCompletionRequest,
    CreateCompletionRequest,
    CreateEmbeddingRequest,
)
from pydantic import BaseModel

from llmaas_hooks import ConfigError, Levels, Promise
from llmaas_patches.internals import server_engine
from llmaas_plugins.server.body_values import parsed, validated
from llmaas_plugins.server.grammars import Wanted
from llmaas_plugins.server.refusal import Refusal
from llmaas_plugins.service.level_arguments import check_levels, levels_of
from llmaas_plugins.service.promise_arguments import check_promise, promise_of
from llmaas_plugins.service.share_arguments import check_share, share_of

__all__ = ["LARGEST_FLOAT", "LONGEST_STOP", "MOST_STOPS", "Checked", "check_body"]

_Asked = TypeVar("_Asked", Levels, Promise)

_BODIES: dict[str, type[BaseModel]] = {
    "chat": CreateChatCompletionRequest,
    "completion": CreateCompletionRequest,
    "embedding": CreateEmbeddingRequest,
}
_NEEDED = {"chat": "messages", "completion": "prompt", "embedding": "input"}
"""Fields without which a body is a mistake. llama_cpp would answer an empty prompt.

Unknown fields are ignored, as in llama_cpp: clients of OpenAI's API send many.
"""
_MOST_GRAMMAR_BYTES = 64 << 10
MOST_STOPS, LONGEST_STOP = 64, 1024
_MOST_BIASES = 1024
_MOST_DIGITS = 10
_MOST_FIELDS, _MOST_SHOWN = 12, 40
"""Most fields of a body that an error names, and most characters of each."""
_MOST_TOKENS = 16_384
"""Most tokens to turn into text: llama_cpp copies the whole text once for each token."""
_MOST_LOGPROBS = 100
_INT32 = range(-(1 << 31), 1 << 31)
_RANGES = {
    "max_tokens": range(-1, 1 << 31),
    "min_tokens": range(1 << 31),
    "top_k": _INT32,
    "logprobs": range(_MOST_LOGPROBS + 1),
    "top_logprobs": range(_MOST_LOGPROBS + 1),
    "seed": range(-(1 << 31), 1 << 32),
}
LARGEST_FLOAT = 1e9
_ONE = ("n", "best_of")
_PENALTIES = ("presence_penalty", "frequency_penalty")
_FLOATS = ("temperature", "repeat_penalty")


class Checked(NamedTuple):
    """Facts about a body that was checked.

    Attributes:
        levels: Levels that the body asks for, without those that the route itself handles, and the
            share of the prompt.
        promise: Latency that the body asks for, with the most tokens of the answer.
        wanted: Grammars and schemas in the body, which remain to be checked.
    """

    levels: Levels
    promise: Promise
    wanted: list[Wanted]


def check_body(route: str, body: bytes) -> Checked:
    """Check that ``route`` can handle ``body``.

    Raises:
        Refusal: The route cannot handle the body.
    """
    values = parsed(body)
    _check_needed(route, values)
    if isinstance(prompt := values.get("prompt"), list) and len(prompt) > 1:
        kind = "token ids; send text" if isinstance(prompt[0], int) else "prompts"
        raise _mistake(f"prompt: expected one prompt, found {len(prompt)} {kind}")
    checked = validated(model, values) if (model := _BODIES.get(route)) is not None else None
    if route == "embedding" and values["input"] == []:
        raise _mistake("input: expected at least one text, found an empty list")
    if route == "embedding" and not server_engine().context_params.embeddings:
        raise _mistake("This server makes no embeddings: start it with --embedding True.")
    if route == "tokens":
        _check_tokens(values.get("tokens"))
    promise = _asked("slo", values.get("slo"), promise_of, check_promise)
    if promise and route == "embedding":
        raise _mistake("slo: embeddings have no first token, so no promise can be kept.")
    share = _asked("prompt_share", values.get("prompt_share"), share_of, check_share)
    if share.prompt_share is not None and route == "embedding":
        raise _mistake("prompt_share: embeddings are of whole texts.")
    most = getattr(checked, "max_tokens", values.get("max_tokens"))
    promise = replace(promise, n_most=most if type(most) is int and most > 0 else None)
    if not isinstance(checked, CreateChatCompletionRequest | CreateCompletionRequest):
        return Checked(share, promise, [])
    _check_numbers(checked)
    _check_lists(checked)
    wanted = list(_wanted(values, is_chat=route == "chat"))
    for one in wanted:
        if (n_bytes := len(one.text.encode())) > _MOST_GRAMMAR_BYTES:
            raise one.mistake(f"it has {n_bytes} bytes, the limit is {_MOST_GRAMMAR_BYTES}")
    levels = _asked("level", values.get("level"), levels_of, check_levels)
    return Checked(levels.over(share), promise, wanted)


def _check_needed(route: str, values: dict[str, Any]) -> None:
    """Refuse a body without the field that a request is about, which may be misspelled."""
    if (name := _NEEDED.get(route)) is not None and name not in values:
        found = ", ".join(repr(one[:_MOST_SHOWN]) for one in [*values][:_MOST_FIELDS]) or "none"
        raise _mistake(f"{name}: expected this field, found {found}")


def _asked(
    name: str, value: object, parse: Callable[[object], _Asked], check: Callable[[_Asked], None]
) -> _Asked:
    """Return what a field asks for.

    Raises:
        Refusal: The field is malformed, or what it asks for is not available.
    """
    try:
        found = parse(value)
        check(found)
    except ConfigError as error:
        raise _mistake(f"{name}: {error}") from error
    return found


def _check_numbers(checked: BaseModel) -> None:
    """Refuse numbers outside the ranges that llama.cpp accepts."""
    for name, fitting in _RANGES.items():
        number = getattr(checked, name, None)
        if type(number) is int and number not in fitting:
            raise _mistake(f"{name}: must be from {fitting[0]} to {fitting[-1]}")
    for name in _ONE:
        if (number := getattr(checked, name, None)) not in {None, 1}:
            raise _mistake(f"{name}: expected 1, the number of answers to a request, got {number}")
    for name in _PENALTIES:
        if getattr(checked, name) is None:
            raise _mistake(f"{name}: must be a number")
    for name in _FLOATS:
        number = getattr(checked, name)
        if abs(number) > LARGEST_FLOAT:
            raise _mistake(f"{name}: must be at most {LARGEST_FLOAT:g}")
        if number < 0:
            raise _mistake(f"{name}: must be at least 0, found {number:g}")


def _check_lists(checked: CreateChatCompletionRequest | CreateCompletionRequest) -> None:
    """Refuse lists that are too long to search at every token, or that have unknown tokens."""
    stops = [checked.stop] if isinstance(checked.stop, str) else checked.stop or []
    if len(stops) > MOST_STOPS or any(len(stop) > LONGEST_STOP for stop in stops):
        raise _mistake(f"stop: at most {MOST_STOPS} strings of {LONGEST_STOP} characters each")
    biases = checked.logit_bias or {}
    if len(biases) > _MOST_BIASES:
        raise _mistake(f"logit_bias: at most {_MOST_BIASES} tokens, found {len(biases)}")
    if checked.logit_bias_type != "tokens":
        n_vocab = server_engine().n_vocab()
        for token in biases:
            if not (_is_number(token) and int(token) < n_vocab):
                expected = f"expected numbers of tokens, integers from 0 to {n_vocab - 1}"
                raise _mistake(f"logit_bias: {expected}, found {token[:40]!r}")


def _is_number(token: str) -> bool:
    return token.isascii() and token.isdigit() and len(token) <= _MOST_DIGITS


def _wanted(values: dict[str, Any], *, is_chat: bool) -> Iterator[Wanted]:
    """Yield the grammars and schemas that llama_cpp always converts for a body.

    Schemas of tools among which the model itself chooses are converted only when one is chosen.
    """
    if grammar := values.get("grammar"):
        yield Wanted("grammar", "grammar", grammar)
    if not is_chat:
        return  # a completion's other fields were not validated
    form = values.get("response_format") or {}
    if form.get("type") == "json_object" and "schema" in form:
        yield Wanted("response_format.schema", "schema", json.dumps(form["schema"]))
    functions = list(values.get("functions") or [])
    functions += [tool["function"] for tool in values.get("tools") or []]
    chosen = [values.get("function_call"), values.get("tool_choice")]
    names = [choice.get("function", choice)["name"] for choice in chosen if type(choice) is dict]
    for function in functions:
        if function["name"] in names:
            yield Wanted("tools", "schema", json.dumps(function["parameters"]))


def _check_tokens(tokens: object) -> None:
    """Refuse tokens outside the vocabulary, for which llama.cpp aborts, and too many of them."""
    n_vocab = server_engine().n_vocab()
    found = tokens if isinstance(tokens, list) else []
    if len(found) > (most := min(server_engine().n_ctx(), _MOST_TOKENS)):
        raise _mistake(
            f"tokens: at most {most} with this context, found {len(found)}. Divide them."
        )
    for token in found:
        if not (isinstance(token, int) and 0 <= token < n_vocab):
            raise _mistake(f"tokens: expected numbers from 0 to {n_vocab - 1}, found {token!r}")


def _mistake(message: str) -> Refusal:
    return Refusal(400, message)
