"""Window of the model on a context that is longer than the engine's limit (LLMS §4).

At the limit, the oldest turns are left out; the system prompt and the newest turns stay. The turns
that stay must be evaluated again, because their cells depended on those left out. Half of the
window is therefore freed at a time. Until it is full again, each prompt extends the previous one
and its cells are reused.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

from llmaas_hooks import LimitError
from llmaas_plugins.chats.prompts import prompt_tokens
from llmaas_plugins.chats.text_limit import TextTooLongError
from llmaas_plugins.config import ServiceConfig
from llmaas_plugins.service.context_log import ContextRecord

__all__ = ["Messages", "Window", "prompt_length", "slide", "visible"]

Messages = list[dict[str, str]]
_AROUND_A_TURN = 256
"""Upper bound on the tokens that a chat template puts around a turn."""


class Window:
    """Part of a context that the model sees.

    Attributes:
        limit: Most tokens in the window.
    """

    def __init__(self, config: ServiceConfig, llama: Any) -> None:
        """Take the smaller of the limits of the configuration and the engine."""
        self.limit = min(config.max_context_tokens or llama.n_ctx(), llama.n_ctx())
        self._llama = llama
        self._slides = config.at_limit == "slide"

    def start(
        self,
        record: ContextRecord,
        messages: Messages,
        options: dict[str, Any],
        *,
        is_counted: bool,
    ) -> int:
        """Return the index of the first of ``messages`` that the model is to see.

        Args:
            record: The context.
            messages: The context's messages, and the prompt.
            options: Options of ``Llama.create_chat_completion``.
            is_counted: Whether this engine counted the tokens in ``record``. Another model may have
                counted them before a restart, or a server with several models did.

        Raises:
            LimitError: The prompt does not fit.
        """
        room = _reply_room(options["max_tokens"], self.limit)
        n_new = len(messages[-1]["content"].encode()) + _AROUND_A_TURN
        if is_counted and record.n_tokens + n_new + room <= self.limit:
            return record.seen_from  # saves tokenizing a long context, which takes milliseconds

        @functools.cache
        def length(start: int) -> int:
            return prompt_length(self._llama, visible(messages, start), options)

        start = record.seen_from
        if self._slides:
            start = slide(messages, start, self.limit, room, length)
        was_full = is_counted and start == record.seen_from and record.n_tokens >= self.limit
        if was_full or length(start) >= self.limit:
            raise self.full(record, length(start))
        return start

    def full(self, record: ContextRecord, n_tokens: int = 0) -> LimitError:
        """Return the error for a prompt that does not fit.

        Args:
            record: The context.
            n_tokens: Least number of tokens that the model would see with the prompt; 0 if unknown.
        """
        seen = f": the model would see {n_tokens} or more" if n_tokens >= self.limit else ""
        way_out = (
            "Shorten it, start a new context,"
            if self._slides
            else 'Start a new context, set service.at_limit = "slide",'
        )
        return LimitError(
            f"context {record.id} holds {record.n_tokens} tokens, and the prompt does not fit into "
            f"{self.limit}{seen}. {way_out} or raise service.max_context_tokens or n_ctx."
        )


def visible(messages: Messages, start: int) -> Messages:
    """Return the system prompt, and the messages from ``start`` on."""
    return [m for i, m in enumerate(messages) if i >= start or m["role"] == "system"]


def slide(
    messages: Messages, start: int, limit: int, room: int, length: Callable[[int], int]
) -> int:
    """Return the first message for the model to see: ``start``, as long as a reply has room.

    Args:
        messages: Messages with the prompt last; turns begin with user messages.
        start: First message seen so far, besides the system prompt.
        limit: Tokens of the window.
        room: Tokens to keep free for the reply.
        length: Function that returns the prompt's tokens if the messages from an index on are seen.
    """
    turns = [i for i, m in enumerate(messages) if i >= start and m["role"] == "user"]
    later = turns[1:]
    if not later or length(start) + room <= limit:
        return start
    found = bisect_left(later, True, key=lambda i: length(i) <= limit // 2)
    last = len(later) - 1
    if found >= last > 0 and length(later[last - 1]) + room <= limit:
        return later[last - 1]  # keep one more turn: a question often refers to the turn before it
    return later[min(found, last)]


def prompt_length(llama: Any, messages: Messages, options: dict[str, Any]) -> int:
    """Return the number of tokens that ``llama`` would make of ``messages``, evaluating none.

    Return 0 if the chat handler makes no list of tokens, but works with the engine itself. A text
    that is sure to exceed the engine's context is not tokenized; the least number is returned.

    Raises:
        LimitError: Tokenizing the messages would take too long.
    """
    try:
        return len(prompt_tokens(llama, messages, options, is_limited=True) or ())
    except TextTooLongError as error:
        if not error.n_tokens:
            raise LimitError(str(error)) from error
        return error.n_tokens


def _reply_room(max_tokens: int | None, limit: int) -> int:
    """Return the tokens to keep free for a reply: its limit, but at most 1/4 of the window."""
    quarter = limit // 4
    return min(max_tokens, quarter) if max_tokens and max_tokens > 0 else quarter
