"""Access to llama_cpp.server: its engine, its lock, and its explanations of errors."""

from __future__ import annotations

import contextlib
import inspect
import json
import re
import secrets
import traceback
from collections.abc import Callable, Generator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeGuard

from fastapi.exceptions import RequestValidationError
from llama_cpp.server import app as server
from llama_cpp.server.errors import RouteErrorHandler
from llama_cpp.server.types import CreateChatCompletionRequest, CreateCompletionRequest

from llmaas_plugins.chats.text_limit import TextTooLongError, check_text
from llmaas_plugins.server.admission import Admission
from llmaas_plugins.server.refusal import Refusal, error_body

__all__ = [
    "engine_lock",
    "explain_mistakes",
    "is_open",
    "limit_texts",
    "record_completions",
    "share_engine",
    "stream_failure",
]

_MISTAKES = re.compile(
    r"can only concatenate str|logprobs is not supported|not found in tools|invalid literal for int"
)
"""Messages of exceptions that a request caused, not the server."""
_TOO_LONG = re.compile("exceed context window")
_SEED_BITS = 31  # not all ones, with which llama.cpp would draw another seed

engine_lock: Callable[[], AbstractAsyncContextManager[Any]] = contextlib.asynccontextmanager(
    server.get_llama_proxy
)


def record_completions(llama: Any, admission: Admission, seed: int | None = None) -> None:
    """Record with each call the completion that serves it, and give ``seed`` to those without.

    The server drops the generator of a stream that breaks off. Garbage collection might close that
    generator much later, and it would then save cells that belong to the next call.

    Without ``seed``, the system's randomness gives one. llama_cpp itself would draw it from the
    seed of the completion before, which may be another app's.
    """
    create = llama.create_completion
    makes_several = str(llama.chat_format).startswith("functionary")  # streams for one answer

    def create_completion(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("seed") is None:
            kwargs["seed"] = secrets.randbits(_SEED_BITS) if seed is None else seed
        found = create(*args, **kwargs)
        if (call := admission.running) is not None:
            if inspect.isgenerator(found) and not call.context:  # a context's stream is shared
                found = admission.shared(call, found, is_last=not makes_several)
            call.completion = found
        return found

    llama.create_completion = create_completion


def is_open(completion: object) -> TypeGuard[Generator[Any]]:
    """Return whether a completion can still produce text."""
    return (
        inspect.isgenerator(completion)
        and inspect.getgeneratorstate(completion) != inspect.GEN_CLOSED
    )


class _Open:
    """Lock that is always free, because ``Admission`` lets one call after another use the engine.

    The server's own locks would keep a call out that goes before an interrupted one.
    """

    async def acquire(self) -> None:
        pass

    def release(self) -> None:
        pass

    def locked(self) -> bool:
        return False


def share_engine() -> None:
    """Let ``Admission`` alone decide which call uses the server's engine."""
    server.llama_outer_lock = server.llama_inner_lock = _Open()


def limit_texts(llama: Any) -> None:
    """Let ``llama`` tokenize for its callers only texts that fit and take an acceptable time."""
    tokenize = llama.tokenize

    def limited(text: bytes, *args: Any, **kwargs: Any) -> list[int]:
        check_text(llama, text)
        tokens: list[int] = tokenize(text, *args, **kwargs)
        return tokens

    llama.tokenize = limited


def explain_mistakes() -> None:
    """Make the server answer 400 or 422, not 500, to more mistakes of its clients."""
    RouteErrorHandler.pattern_and_formatters[_MISTAKES] = lambda _, found: (
        400,
        error_body(400, found.string)["error"],
    )
    explain = RouteErrorHandler.error_message_wrapper

    def explained(handler: Any, error: Exception, body: Any = None) -> tuple[int, Any]:
        if isinstance(error, RequestValidationError):
            raise error  # to the exception handler of all routes
        is_explained = isinstance(body, CreateChatCompletionRequest | CreateCompletionRequest)
        if isinstance(error, UnicodeDecodeError) and not is_explained:
            message = (
                "tokens: their text begins or ends inside a character. Send all of its tokens."
            )
            return 400, error_body(400, message)["error"]
        if isinstance(error, TextTooLongError) and not error.n_tokens:
            return 400, error_body(400, str(error))["error"]
        if _is_about_messages(error):
            reason = " ".join(str(error).split()) or type(error).__name__
            message = f"The chat format cannot work with these messages or tools: {reason}"
            return 400, error_body(400, message)["error"]
        if not is_explained and (_MISTAKES.search(str(error)) or _TOO_LONG.search(str(error))):
            code = "context_length_exceeded" if _TOO_LONG.search(str(error)) else None
            return 400, error_body(400, str(error), code)["error"]
        return explain(handler, error=error, body=body)

    RouteErrorHandler.error_message_wrapper = explained


def _is_about_messages(error: Exception) -> bool:
    """Return whether an error comes from making a prompt of the messages, before anything ran."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    file = Path(frame.f_code.co_filename)
    return file.name in ("llama_chat_format.py", "<template>") or "jinja2" in file.parts


def stream_failure(body: bytes, error: Exception) -> Refusal:
    """Return the server's answer to ``error``, which the server does not send for streams."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    values = json.loads(body)
    kind = CreateChatCompletionRequest if "messages" in values else CreateCompletionRequest
    try:
        request: Any = kind(**values)
    except ValueError:  # the server does not explain errors of a body with another route's fields
        request = None
    handler: Any = RouteErrorHandler
    status, found = handler.error_message_wrapper(handler, error, request)
    return Refusal(status, found["message"], found["code"])
