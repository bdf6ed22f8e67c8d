"""Conversations that are cut where a speaker begins, and the text that follows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from llmaas_eval.data import chat_lines
from llmaas_eval.prompts.engine import Engine
from llmaas_hooks import Tokens

__all__ = ["KINDS", "Passage", "Texts", "conversations", "passages"]

Texts = Sequence[Sequence[str]]
"""Conversations, each of which is its lines."""

_LARGEST_QUESTION = 0.25
"""Largest share of a prompt's tokens that are its question."""


class Passage(NamedTuple):
    """A prompt and the text that really follows it.

    Attributes:
        kind: One of ``KINDS``.
        number: Number of the passage.
        prompt: Tokens of the prompt; it ends with a speaker's name.
        n_question: Number of its last tokens that are the question: the last line and that name.
        rest: Tokens of the text that follows.
        document: Number of the conversation that it is cut from.
    """

    kind: str
    number: int
    prompt: Tokens
    n_question: int
    rest: Tokens
    document: int


def conversations(data: Path) -> dict[str, Texts]:
    """Return the conversations of each kind.

    Args:
        data: Folder of the data sets.
    """
    return {kind: read(data) for kind, read in KINDS.items()}


def passages(
    engine: Engine, texts: Mapping[str, Texts], n: int, lengths: tuple[int, int], n_rest: int
) -> Iterator[Passage]:
    """Yield ``n`` passages; the kinds take turns.

    Args:
        engine: Engine whose tokens are used.
        texts: Conversations of each kind.
        n: Number of passages.
        lengths: Fewest and most tokens of a prompt.
        n_rest: Number of tokens that follow.
    """
    randoms = {kind: Random(f"passages {kind}") for kind in texts}  # noqa: S311 - texts
    kinds = list(texts)
    for number in range(n):
        kind = kinds[number % len(kinds)]
        while True:
            document = randoms[kind].randrange(len(texts[kind]))
            lines = texts[kind][document]
            found = _passage(engine, randoms[kind], lines, lengths, n_rest)
            if found is not None:
                yield Passage(kind, number, *found, document)
                break


def _passage(
    engine: Engine, random: Random, lines: Sequence[str], lengths: tuple[int, int], n_rest: int
) -> tuple[Tokens, int, Tokens] | None:
    """Return prompt, length of its question, and rest; None if a random cut does not serve."""
    low, high = lengths
    end = random.randrange(1, max(2, len(lines)))
    start, n_wanted = end, random.randrange(low, high)
    while start > 0 and sum(map(len, lines[start:end])) < _CHARACTERS * n_wanted:
        start -= 1
    before, question = _joined(lines[start : end - 1]), f"{lines[end - 1]}\n"
    if end == len(lines) or ":" not in lines[end]:
        return None
    name = f"{lines[end].partition(':')[0]}:"
    after = _joined(lines[end : end + _N_LINES_AFTER])[len(name) :]
    prompt = engine.tokens(before + question + name)
    n_question = len(prompt) - len(engine.tokens(before))
    tokens = engine.tokens(before + question + name + after)
    rest = tokens[len(prompt) :][:n_rest]
    is_begun = bool((tokens[: len(prompt)] == prompt).all())
    fits = low <= len(prompt) <= high and n_question <= _LARGEST_QUESTION * len(prompt)
    return (prompt, n_question, rest) if fits and is_begun and len(rest) == n_rest else None


_CHARACTERS, _N_LINES_AFTER = 3.5, 24
"""Characters of a token, and lines that are enough to follow a prompt."""


def _joined(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _services(data: Path) -> list[list[str]]:
    return chat_lines(data, "sgd_dev")


def _dialogues(data: Path) -> list[list[str]]:
    return [row["dialogue"].splitlines() for row in _rows(data, "dialogsum_test")]


def _meetings(data: Path) -> list[list[str]]:
    return [
        [f"{turn['role']}: {turn['content']}" for turn in row["turns"]]
        for row in _rows(data, "qmsum_val20")
    ]


def _rows(data: Path, name: str) -> Iterator[dict[str, Any]]:
    with (data / "tasks" / f"{name}.jsonl").open(encoding="utf-8") as file:
        yield from map(json.loads, file)


KINDS: Mapping[str, Callable[[Path], list[list[str]]]] = {
    "services": _services,
    "dialogues": _dialogues,
    "meetings": _meetings,
}
"""Kinds of conversations, with their readers."""
