"""One call at a time on the engine: queue, generate, commit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llmaas_hooks import LimitError
from llmaas_patches import serving_context
from llmaas_plugins.config import ServiceConfig
from llmaas_plugins.service.contexts import ContextLog, ContextRecord

__all__ = ["Reply", "Turns"]


@dataclass(frozen=True, slots=True)
class Reply:
    """What a call returned.

    Attributes:
        text: The generated text.
        finish_reason: ``stop`` or ``length``.
        n_tokens: Tokens in the context now.
        first_token_s: Seconds from the start on the engine to the first piece of text.
        total_s: Seconds on the engine.
    """

    text: str
    finish_reason: str
    n_tokens: int
    first_token_s: float
    total_s: float


class Turns:
    """Serves calls in the order they came, a bounded number waiting."""

    def __init__(self, engine: Callable[[], Any], config: ServiceConfig, log: ContextLog) -> None:
        """Serve the ``Llama`` that ``engine()`` returns."""
        self._engine = engine
        self._config = config
        self._log = log
        self._turn = threading.Condition()
        self._next_ticket = 0
        self._serving = 0

    def queue_length(self) -> int:
        """Calls that run or wait."""
        with self._turn:
            return self._next_ticket - self._serving

    def run(
        self, load: Callable[[], ContextRecord], prompt: str, sampling: dict[str, Any]
    ) -> Generator[str, None, Reply]:
        """Generate a reply to ``prompt`` in the context that ``load()`` reads.

        Yields:
            Pieces of text.

        Returns:
            The reply; by then it is committed.
        """
        with self._slot():
            record, llama = load(), self._engine()
            limit = min(self._config.max_context_tokens or llama.n_ctx(), llama.n_ctx())
            if record.n_tokens >= limit:
                raise _full(record, limit)
            messages = [*record.messages, {"role": "user", "content": prompt}]
            started = time.perf_counter()
            options = {"max_tokens": self._config.max_new_tokens, **sampling}
            options["max_tokens"] = min(options["max_tokens"], limit - record.n_tokens)
            pieces: list[str] = []
            finish_reason, first_token_s = "stop", 0.0
            for piece, reason in _completion(llama, record, messages, limit, options):
                finish_reason = reason or finish_reason
                if piece:
                    first_token_s = first_token_s or time.perf_counter() - started
                    pieces.append(piece)
                    yield piece
            text = "".join(pieces).strip()
            record.messages = [*messages, {"role": "assistant", "content": text}]
            record.n_tokens, record.used = int(llama.n_tokens), time.time()
            record.n_calls += 1
            self._log.put(record)
            total_s = time.perf_counter() - started
            return Reply(text, finish_reason, record.n_tokens, first_token_s, total_s)

    @contextmanager
    def _slot(self) -> Iterator[None]:
        with self._turn:
            waiting, most = self._next_ticket - self._serving, self._config.max_queue
            if waiting > most:
                raise LimitError(
                    f"{waiting} calls are running or waiting, the limit is {most}. "
                    "Try again later, or raise service.max_queue."
                )
            ticket = self._next_ticket
            self._next_ticket += 1
            self._turn.wait_for(lambda: self._serving == ticket)
        try:
            yield
        finally:
            with self._turn:
                self._serving += 1
                self._turn.notify_all()


def _completion(
    llama: Any,
    record: ContextRecord,
    messages: list[dict[str, str]],
    limit: int,
    options: dict[str, Any],
) -> Iterator[tuple[str, str | None]]:
    """Pieces of text and the finish reason, from llama-cpp-python's own chat completion."""
    try:
        chunks = llama.create_chat_completion(messages=messages, stream=True, **options)
        while True:
            # a generator runs in its caller's context, so the name is set for each step alone
            with serving_context(record.id):
                chunk = next(chunks, None)
            if chunk is None:
                return
            choice = chunk["choices"][0]
            yield choice["delta"].get("content") or "", choice["finish_reason"]
    except ValueError as error:
        if "exceed context window" in str(error):
            raise _full(record, limit) from error
        raise


def _full(record: ContextRecord, limit: int) -> LimitError:
    return LimitError(
        f"context {record.id} holds {record.n_tokens} tokens and the prompt does not fit into "
        f"{limit}. Start a new context, or raise service.max_context_tokens or n_ctx."
    )
