"""What a model sees of a context that is longer than the engine's window (LLMS §4).

At the limit, the oldest turns are left out; the system prompt and the newest turns stay. What stays
has to be evaluated again, because its cells depended on what went. So half of the window is freed
at a time: until it is full again, the prompts of the calls continue each other as ever.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

from llmaas_hooks import LimitError
from llmaas_plugins.config import ServiceConfig
from llmaas_plugins.prompts import prompt_tokens
from llmaas_plugins.service.contexts import ContextRecord

__all__ = ["Messages", "Window", "prompt_length", "slide", "visible"]

Messages = list[dict[str, str]]
_AROUND_A_TURN = 256
"""More tokens than a chat template puts around a turn."""


class Window:
    """How much of a context an engine takes.

    Attributes:
        limit: In tokens.
    """

    def __init__(self, config: ServiceConfig, llama: Any) -> None:
        """Look at the limits of both."""
        self.limit = min(config.max_context_tokens or llama.n_ctx(), llama.n_ctx())
        self._llama = llama
        self._slides = config.at_limit == "slide"

    def start(self, record: ContextRecord, messages: Messages, options: dict[str, Any]) -> int:
        """From which of ``messages`` on the model is to see the context.

        Args:
            record: The context.
            messages: Its messages, and the prompt.
            options: Of ``Llama.create_chat_completion``.

        Raises:
            LimitError: The prompt does not fit.
        """
        room = _reply_room(options["max_tokens"], self.limit)
        n_new = len(messages[-1]["content"].encode()) + _AROUND_A_TURN
        if record.n_calls and record.n_tokens + n_new + room <= self.limit:
            return record.seen_from  # tokenizing a long context takes milliseconds

        @functools.cache
        def length(start: int) -> int:
            return prompt_length(self._llama, visible(messages, start), options)

        start = record.seen_from
        if self._slides:
            start = slide(messages, start, self.limit, room, length)
        was_full = start == record.seen_from and record.n_tokens >= self.limit
        if was_full or length(start) >= self.limit:
            raise self.full(record)
        return start

    def full(self, record: ContextRecord) -> LimitError:
        """The error of a prompt that does not fit."""
        way_out = (
            "Shorten it, start a new context,"
            if self._slides
            else 'Start a new context, set service.at_limit = "slide",'
        )
        return LimitError(
            f"context {record.id} holds {record.n_tokens} tokens and the prompt does not fit into "
            f"{self.limit}. {way_out} or raise service.max_context_tokens or n_ctx."
        )


def visible(messages: Messages, start: int) -> Messages:
    """The system prompt, and the messages from ``start`` on."""
    return [m for i, m in enumerate(messages) if i >= start or m["role"] == "system"]


def slide(
    messages: Messages, start: int, limit: int, room: int, length: Callable[[int], int]
) -> int:
    """From which message on the model sees: ``start``, as long as there is room for a reply.

    Args:
        messages: The prompt last. Turns begin with the user's messages.
        start: First message seen so far, besides the system prompt.
        limit: Tokens of the window.
        room: Tokens that the reply should find free.
        length: Tokens of the prompt, if the messages from there on are seen.
    """
    turns = [i for i, m in enumerate(messages) if i >= start and m["role"] == "user"]
    later = turns[1:]
    if not later or length(start) + room <= limit:
        return start
    found = bisect_left(later, True, key=lambda i: length(i) <= limit // 2)
    last = len(later) - 1
    if found >= last > 0 and length(later[last - 1]) + room <= limit:
        return later[last - 1]  # a question is seldom understood without the turn before it
    return later[min(found, last)]


def prompt_length(llama: Any, messages: Messages, options: dict[str, Any]) -> int:
    """Tokens of the prompt that ``llama`` would make of ``messages``; nothing is evaluated.

    0 if its chat handler does not make a list of tokens, but works with the engine itself.
    """
    return len(prompt_tokens(llama, messages, options) or ())


def _reply_room(max_tokens: int | None, limit: int) -> int:
    """Tokens that a reply should find free: what it may have, but not much of the window."""
    quarter = limit // 4
    return min(max_tokens, quarter) if max_tokens and max_tokens > 0 else quarter
