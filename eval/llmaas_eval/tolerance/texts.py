"""Contexts from real text, and the text that follows them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from random import Random
from typing import NamedTuple

from llmaas_eval.data import books, chat_lines, packaged_lines, wikitext
from llmaas_eval.traces.families import FAMILIES, family_texts

__all__ = [
    "CHUNK",
    "TASKS",
    "Sample",
    "Tokenize",
    "packaged_samples",
    "samples",
]

CHUNK = 16
"""Number of tokens in a chunk; contexts are whole chunks."""
_CHARACTERS_PER_TOKEN = 5
_N_LINES_OF_A_QUESTION = 40

_N_CTX, _SHORTEST, _N_REST = 1024, 320, 64
"""Numbers of tokens: of the engine's context, of the shortest sample context, and of a rest."""

Tokenize = Callable[[str], list[int]]


class Sample(NamedTuple):
    """A context and the tokens that follow it."""

    task: str
    context: list[int]
    rest: list[int]


def samples(
    data: Path,
    tokenize: Tokenize,
    n_each: int,
    tasks: Iterable[str] | None = None,
    seed: int = 0,
) -> Iterator[Sample]:
    """Yield ``n_each`` samples of each of ``tasks``, task after task.

    Args:
        data: Folder of the data sets: ``tasks``, ``chat`` and ``lm``.
        tokenize: Function from text that begins a line to tokens.
        n_each: Number of samples of each task.
        tasks: Names in ``TASKS``; None is all of them.
        seed: Seed of the choice of texts and of their lengths.
    """
    for task in tasks or TASKS:
        random = Random(f"{task} {seed}")  # noqa: S311 - texts, no secret
        texts = TASKS[task](data)
        for _ in range(n_each):
            size = CHUNK * random.randrange(_SHORTEST // CHUNK, (_N_CTX - _N_REST) // CHUNK)
            tokens = tokenize(_stretch(random, texts, size + _N_REST))
            yield Sample(task, tokens[:size], tokens[size : size + _N_REST])


def _stretch(random: Random, texts: Sequence[str], n_tokens: int) -> str:
    """Return consecutive texts from a random start, long enough for ``n_tokens`` tokens."""
    start = random.randrange(len(texts))
    found, length = list[str](), 0
    for text in chain(texts[start:], texts):
        found.append(text)
        length += len(text)
        if length > 2 * _CHARACTERS_PER_TOKEN * n_tokens:
            break
    return "".join(found)


def packaged_samples(
    tokenize: Tokenize, *, n_context: int = 320, n_rest: int = 32
) -> Iterator[Sample]:
    """Yield samples of the suite's own conversations, which are in no data set."""
    for lines in packaged_lines():
        tokens = tokenize("".join(f"{line}\n" for line in lines))[: n_context + n_rest]
        if len(tokens) == n_context + n_rest:
            yield Sample("packaged", tokens[:n_context], tokens[n_context:])


def _chats(name: str) -> Callable[[Path], list[str]]:
    return lambda data: ["\n".join([*lines, ""]) for lines in chat_lines(data, name)]


def _paragraphs(read: Callable[[Path], list[str]]) -> Callable[[Path], list[str]]:
    return lambda data: [
        f"{' '.join(paragraph.split())}\n"
        for text in read(data)
        for paragraph in re.split(r"\n\s*\n", text)
        if len(paragraph) > 200
    ]


def _family(name: str) -> Callable[[Path], list[str]]:
    def read(data: Path) -> list[str]:
        rows = family_texts(data / "tasks", name)
        return [f"User: {_begin(question)}\nAssistant: {answer}\n" for question, answer in rows]

    return read


def _begin(question: str) -> str:
    """Return the first lines of a question, which may contain the transcript of a whole meeting."""
    return "\n".join(question.splitlines()[:_N_LINES_OF_A_QUESTION])


TASKS: dict[str, Callable[[Path], list[str]]] = {
    **{name: _family(name) for name in FAMILIES},
    "chats": _chats("mtbench101"),
    "services": _chats("sgd_dev"),
    "novels": _paragraphs(books),
    "wikitext": _paragraphs(lambda data: [wikitext(data)]),
}
"""Tasks with their readers: the six of LLMS Table 3, and four with longer texts."""
