"""JSON values of request bodies, limited so that no body takes much time or memory to check."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from llmaas_plugins.server.refusal import Refusal, mistakes
from llmaas_plugins.validation import validate

__all__ = ["MOST_ENTRIES", "MOST_VALUES", "parsed", "validated"]

_MOST_NESTED = 64
MOST_VALUES = 32_768
"""Most values in a body: 10,000 messages, or 32,000 tokens."""
MOST_ENTRIES = 4096
"""Most entries of a list or object, but for lists of messages, of tokens and of prompts."""
_LONG_LISTS = ("messages", "tokens", "prompt")
_SLICE_VALUES = 512
"""Values in messages to validate at once: pydantic describes each mistake, about 1 kB for one."""


def parsed(body: bytes) -> dict[str, Any]:
    """Parse a body, which must be a finite JSON object in UTF-8 with bounded nesting and size.

    Raises:
        Refusal: It is not.
    """
    try:
        values = from_json(body)
        if not isinstance(values, dict):
            raise Refusal(400, f"The body must be a JSON object, found {type(values).__name__}.")
        _check_sizes(values)
        json.dumps(values, allow_nan=False)
    except ValueError as error:
        raise Refusal(400, f"The body is not JSON: {error}") from error
    return values


def validated(model: type[BaseModel], values: dict[str, Any]) -> BaseModel:
    """Return a body as ``model``; a long list of messages is checked up to the first mistakes.

    Raises:
        Refusal: The model does not take it.
    """
    first = 0
    try:
        messages = values.get("messages") if "messages" in model.model_fields else None
        if not isinstance(messages, list):
            return validate(model, values)
        checked = validate(model, values | {"messages": []})
        for first, last in _slices(messages):
            validate(model, {"messages": messages[first:last]})
    except ValidationError as error:
        found = error.errors(include_context=False, include_input=False, include_url=False)
        raise Refusal(400, mistakes(map(functools.partial(_moved, by=first), found))) from None
    return checked


def _check_sizes(values: dict[str, Any]) -> None:
    left = MOST_VALUES
    waiting: list[tuple[str, Any, int]] = [("The body", values, 0)]
    while waiting:
        name, value, depth = waiting.pop()
        if depth == _MOST_NESTED:
            most = f"{_MOST_NESTED} levels, the limit"
            raise Refusal(400, f"The body's JSON is nested deeper than {most}.")
        n = len(value)
        is_long = depth == 1 and name in _LONG_LISTS
        if n > MOST_ENTRIES and not is_long:
            raise Refusal(400, f"{name}: at most {MOST_ENTRIES} entries, found {n}")
        if (left := left - n) < 0:
            raise Refusal(400, f"The body has more than {MOST_VALUES} values, the limit.")
        pairs = value.items() if isinstance(value, dict) else ((name, inner) for inner in value)
        waiting += (
            (key, inner, depth + 1) for key, inner in pairs if isinstance(inner, dict | list)
        )


def _slices(messages: list[Any]) -> Iterator[tuple[int, int]]:
    """Yield the bounds of slices of some hundred values, or of one message."""
    first = n_values = 0
    for last, message in enumerate(messages):
        n_values += _n_values(message)
        if n_values > _SLICE_VALUES:
            yield first, last + 1
            first, n_values = last + 1, 0
    yield first, len(messages)


def _n_values(value: object) -> int:
    if not isinstance(value, dict | list):
        return 1
    return 1 + sum(map(_n_values, value.values() if isinstance(value, dict) else value))


def _moved(error: Any, by: int) -> Any:
    """Return an error about a message with its place among all messages."""
    field, *where = error["loc"]
    if field == "messages" and where:
        where[0] += by
    return {**error, "loc": (field, *where)}
