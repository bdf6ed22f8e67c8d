"""Bodies that the server would answer with 500, or that would end its process."""

from __future__ import annotations

import json
from typing import Any

from llama_cpp import llama_cpp
from llama_cpp.server.types import (
    CreateChatCompletionRequest,
    CreateCompletionRequest,
    CreateEmbeddingRequest,
)
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from llmaas_hooks import ConfigError, Levels
from llmaas_plugins.service.levels import check_levels, levels_of
from llmaas_plugins.service.refusal import Refusal, mistakes
from llmaas_plugins.service.upstream import server_engine

__all__ = ["check_body"]

_BODIES: dict[str, type[BaseModel]] = {
    "chat": CreateChatCompletionRequest,
    "completion": CreateCompletionRequest,
    "embedding": CreateEmbeddingRequest,
}


def check_body(route: str, body: bytes) -> Levels:
    """See whether ``body`` is one that ``route`` can work with.

    Returns:
        The levels that it asks for, if the route itself does not know of levels.

    Raises:
        Refusal: It is not.
    """
    values = _parsed(body)
    if (model := _BODIES.get(route)) is not None:
        _validate(model, values)
    if route == "embedding" and not server_engine().context_params.embeddings:
        raise _mistake("This server makes no embeddings: start it with --embedding True.")
    if isinstance(prompt := values.get("prompt"), list) and len(prompt) > 1:
        raise _mistake(f"prompt: one at a time, found {len(prompt)}")
    if route == "tokens":
        _check_tokens(values.get("tokens"))
    if route not in ("chat", "completion"):
        return Levels()
    if grammar := values.get("grammar"):
        _check_grammar(grammar)
    return _levels(values.get("level"))


def _parsed(body: bytes) -> dict[str, Any]:
    """The values in a body: JSON that is UTF-8, finite, and not nested without end."""
    try:
        values = from_json(body)
        json.dumps(values, allow_nan=False)
    except ValueError as error:
        raise _mistake(f"The body is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise _mistake(f"The body must be a JSON object, found {type(values).__name__}.")
    return values


def _validate(model: type[BaseModel], values: dict[str, Any]) -> None:
    try:
        model.model_validate(values)
    except ValidationError as error:
        raise _mistake(mistakes(error.errors(include_input=False, include_url=False))) from error


def _levels(value: object) -> Levels:
    try:
        levels = levels_of(value)
        check_levels(levels)
    except ConfigError as error:
        raise _mistake(f"level: {error}") from error
    return levels


def _check_grammar(grammar: str) -> None:
    """llama.cpp hands a null pointer on when it cannot parse a grammar."""
    vocab = llama_cpp.llama_model_get_vocab(server_engine().model)
    sampler = llama_cpp.llama_sampler_init_grammar(vocab, grammar.encode(), b"root")
    if not sampler:
        raise _mistake("grammar: llama.cpp cannot parse it")
    llama_cpp.llama_sampler_free(sampler)


def _check_tokens(tokens: object) -> None:
    """llama.cpp aborts the process for tokens that its vocabulary does not have."""
    n_vocab = server_engine().n_vocab()
    for token in tokens if isinstance(tokens, list) else []:
        if not (isinstance(token, int) and 0 <= token < n_vocab):
            raise _mistake(f"tokens: expected numbers from 0 to {n_vocab - 1}, found {token!r}")


def _mistake(message: str) -> Refusal:
    return Refusal(400, message)
