"""Trace of the demo: conversations become contexts, and a Markov chain switches among them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from llmaas_hooks import ConfigError
from llmaas_plugins.chats.exports import Conversation, load_conversations

__all__ = ["Script", "ScriptedCall", "make_trace", "scripts_from"]

_STAY = 0.35
"""Probability that the next call uses the same context (LLMS §4, Markov pattern)."""


@dataclass(frozen=True, slots=True)
class Script:
    """System prompt and user turns of one context.

    Attributes:
        app: App that the context belongs to.
        system: System prompt, or empty.
        turns: User turns in order.
    """

    app: str
    system: str
    turns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ScriptedCall:
    """One call of the trace.

    Attributes:
        context: Index of the context's script.
        turn: Index of the user turn.
    """

    context: int
    turn: int


def scripts_from(data: Path | None, n_contexts: int) -> list[Script]:
    """Return scripts made from the user's chat export, or from the packaged conversations.

    Raises:
        ConfigError: The export cannot be read or has fewer than two conversations with user turns.
    """
    if data is not None:
        conversations = load_conversations(data)
    else:
        folder = Path(str(resources.files(__package__))) / "conversations"
        files = [load_conversations(path) for path in sorted(folder.glob("*.jsonl"))]
        conversations = [c for group in zip(*files, strict=True) for c in group]
    scripts = [script for script in map(_script, conversations) if script.turns]
    if len(scripts) < 2:
        raise ConfigError(f"{data}: found {len(scripts)} conversations with user turns, need 2")
    return scripts[:n_contexts]


def make_trace(scripts: Sequence[Script], n_calls: int | None, seed: int) -> list[ScriptedCall]:
    """Return the calls in order.

    The next call stays in its context with a probability of 0.35. Otherwise a context that was used
    more recently is more likely.
    """
    rng = random.Random(seed)  # noqa: S311  a trace, not a secret
    recent = list(range(len(scripts)))
    rng.shuffle(recent)
    done = [0] * len(scripts)
    trace: list[ScriptedCall] = []
    while recent and (n_calls is None or len(trace) < n_calls):
        weights = [1 / (rank + 1) for rank in range(len(recent))]
        stay = trace and recent[0] == trace[-1].context and rng.random() < _STAY
        if not stay and len(recent) > 1:
            weights[0] = 0
        chosen = recent[0] if stay else rng.choices(recent, weights)[0]
        trace.append(ScriptedCall(chosen, done[chosen]))
        done[chosen] += 1
        recent.remove(chosen)
        if done[chosen] < len(scripts[chosen].turns):
            recent.insert(0, chosen)
    return trace


def _script(conversation: Conversation) -> Script:
    messages = conversation.messages
    system = next((m.content for m in messages if m.role == "system"), "")
    turns = tuple(m.content for m in messages if m.role == "user")
    return Script(conversation.app, system, turns)
