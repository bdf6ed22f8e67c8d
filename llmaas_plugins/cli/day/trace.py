"""The day: which app calls when, and what it was promised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llmaas_hooks import ConfigError, common_prefix
from llmaas_plugins.chats.exports import Conversation, load_conversations
from llmaas_plugins.cli.given_text import conversation_files
from llmaas_plugins.demo.scenario import Script, make_trace
from llmaas_plugins.demo.worker import PLAIN_TEMPLATE

__all__ = [
    "PROMISES",
    "Call",
    "Pace",
    "Shares",
    "Talk",
    "calls_of",
    "fitting",
    "openings",
    "order_of",
    "talks_from",
]


class Shares(NamedTuple):
    """Promise to an app, as shares of the time that the whole model takes.

    Attributes:
        first: Longest time to the first token, as a share of the time for the whole prompt; None
            promises nothing.
        further: Longest mean time of a further token; None promises nothing.
    """

    first: float | None
    further: float | None


PROMISES: Mapping[str, Shares] = {
    "smart_reply": Shares(0.4, 0.8),
    "ui_agent": Shares(0.5, 0.9),
    "chat": Shares(0.6, 1.2),
    "translation": Shares(0.6, 1.2),
    "classification": Shares(0.6, None),
    "summary": Shares(None, None),
}
"""Promise to each app. Two apps want faster tokens than the whole model gives. Nobody waits for a
summary.
"""
_OTHERS = Shares(0.6, 1.2)
_MOST_TALKS, _MOST_CTX = 6, 4096


class Talk(NamedTuple):
    """Conversation of an app with a growing context.

    Attributes:
        app: Name of the app.
        system: System message, or empty.
        turns: The user's messages, each with its reply, in order.
    """

    app: str
    system: str
    turns: tuple[tuple[str, str], ...]

    def messages(self, turn: int) -> list[dict[str, str]]:
        """Return the messages up to the user's in ``turn``."""
        said = [{"role": "system", "content": self.system}] if self.system else []
        for user, reply in self.turns[:turn]:
            said.append({"role": "user", "content": user})
            said.append({"role": "assistant", "content": reply})
        return [*said, {"role": "user", "content": self.turns[turn][0]}]


class Call(NamedTuple):
    """Call of an app, with the reply that all systems are led through.

    Attributes:
        app: Name of the app.
        context: Number of the app's context.
        prompt: Tokens of the prompt.
        answer: Tokens of the reply.
        first_s: Longest time to the first token that was promised, in seconds; None if nothing was.
        further_s: Longest mean time of a further token that was promised, in seconds; None if
            nothing was.
    """

    app: str
    context: int
    prompt: Sequence[int]
    answer: Sequence[int]
    first_s: float | None = None
    further_s: float | None = None


class Pace(NamedTuple):
    """Times of the whole model in vanilla llama.cpp, with all memory.

    Attributes:
        n_tokens: Lengths of prompts, ascending.
        first_s: Seconds to the first token after each.
        further_s: Seconds of a further token after each.
    """

    n_tokens: Sequence[int]
    first_s: Sequence[float]
    further_s: Sequence[float]

    def first(self, n_tokens: int) -> float:
        """Return the seconds to the first token after a prompt."""
        least = self.n_tokens[0]
        found = float(np.interp(n_tokens, self.n_tokens, self.first_s))
        return found if n_tokens >= least else found * max(n_tokens, 1) / least

    def further(self, n_tokens: int) -> float:
        """Return the seconds of a further token."""
        return float(np.interp(n_tokens, self.n_tokens, self.further_s))

    def promised(self, call: Call) -> Call:
        """Return a call with the limits that its app was promised."""
        shares, n_tokens = PROMISES.get(call.app, _OTHERS), len(call.prompt)
        return call._replace(
            first_s=None if shares.first is None else shares.first * self.first(n_tokens),
            further_s=None if shares.further is None else shares.further * self.further(n_tokens),
        )

    def seconds(self, call: Call) -> float:
        """Return the seconds of a call whose whole prompt is evaluated."""
        n_tokens = len(call.prompt)
        return self.first(n_tokens) + len(call.answer) * self.further(n_tokens)


def talks_from(data: Path | None) -> list[Talk]:
    """Return one conversation of each packaged app, or the first ones of the user's export.

    Raises:
        ConfigError: The export cannot be read, or has fewer than two conversations with replies.
    """
    if data is None:
        found = [load_conversations(path)[-1] for path in conversation_files()]
    else:
        found = load_conversations(data)
    talks = [talk for talk in map(_talk, found) if talk.turns]
    if len(talks) < 2:
        raise ConfigError(
            f"{data}: found {len(talks)} conversations in which the user got a reply, expected 2 "
            "or more."
        )
    return talks[:_MOST_TALKS]


def order_of(talks: Sequence[Talk], seed: int) -> list[tuple[int, int]]:
    """Return the context and the turn of each call, in order."""
    scripts = [
        Script(talk.app, talk.system, tuple(user for user, _ in talk.turns)) for talk in talks
    ]
    return [(call.context, call.turn) for call in make_trace(scripts, None, seed)]


def calls_of(
    vocab: Any, talks: Sequence[Talk], order: Sequence[tuple[int, int]], n_new: int
) -> list[Call]:
    """Return the calls as tokens, in order; a conversation ends when its context is full.

    Args:
        vocab: A ``Llama`` with the vocabulary and the metadata of the model.
        talks: Conversation of each context.
        order: Context and turn of each call.
        n_new: Most tokens of a reply.

    Raises:
        ConfigError: No call fits into a context.
    """
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    arch = vocab.metadata.get("general.architecture", "llama")
    most = min(int(vocab.metadata.get(f"{arch}.context_length", _MOST_CTX)), _MOST_CTX)
    template = vocab.metadata.get("tokenizer.chat_template", PLAIN_TEMPLATE)
    chat: Any = Jinja2ChatFormatter(template, eos_token="", bos_token="")
    calls: list[Call] = []
    full: set[int] = set()
    for context, turn in order:
        talk = talks[context]
        text = chat(messages=talk.messages(turn)).prompt
        said = f"{text} {talk.turns[turn][1]}"
        prompt, whole = (vocab.tokenize(one.encode(), special=True) for one in (text, said))
        n_prompt = common_prefix(np.array(prompt), np.array(whole))
        end = min(n_prompt + n_new, len(whole))
        if end >= most:
            full.add(context)
        elif context not in full:
            calls.append(Call(talk.app, context, whole[:n_prompt], whole[n_prompt:end]))
    if not calls:
        raise ConfigError(f"no conversation fits into a context of {most} tokens.")
    return calls


def fitting(seconds: Sequence[float], most_s: float, least: int) -> int:
    """Return how many of the last calls fit into a time, but no fewer than ``least``."""
    n_fit = int(np.searchsorted(np.cumsum([*reversed(seconds)]), most_s, side="right"))
    return min(max(n_fit, least), len(seconds))


def openings(calls: Sequence[Call], n_last: int) -> list[Call]:
    """Return each context's last call before the ``n_last`` last calls of all, in order."""
    found: dict[int, Call] = {}
    for call in calls[: len(calls) - n_last]:
        found.pop(call.context, None)
        found[call.context] = call
    return [*found.values()]


# -- inside --------------------------------------------------------------------------------------


def _talk(conversation: Conversation) -> Talk:
    system, asked = "", None
    turns: list[tuple[str, str]] = []
    for message in conversation.messages:
        if message.role == "system" and not turns:
            system = message.content
        elif message.role == "user":
            asked = message.content
        elif message.role == "assistant" and asked is not None:
            turns.append((asked, message.content))
            asked = None
    return Talk(conversation.app, system, tuple(turns))
