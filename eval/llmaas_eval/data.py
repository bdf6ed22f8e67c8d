"""Texts of all studies: the folder of the data sets, and the packaged conversations.

The folder has ``chat`` (conversations as JSONL), ``lm`` (long texts) and ``tasks`` (questions with
answers; ``llmaas_eval.traces.families`` reads them).
"""

from __future__ import annotations

import json
import lzma
import os
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from llmaas_plugins.chats.exports import load_conversations

__all__ = [
    "DATA",
    "TRAINING_TEXT",
    "VALIDATION_TEXT",
    "books",
    "chat_lines",
    "chat_rows",
    "documents_by_kind",
    "packaged_chats",
    "packaged_documents",
    "packaged_lines",
    "read_documents",
    "wikitext",
]

DATA = Path(os.environ.get("LLMAAS_DATA", "../shared/data"))
"""Default folder of the data sets, relative to the repository; ``LLMAAS_DATA`` sets another."""

TRAINING_TEXT = Path("lm/reference_train.txt.xz")
VALIDATION_TEXT = Path("lm/reference_val.txt")
"""Parts of the reference model's text, in the folder of the data sets."""

_DOCUMENT = "\n<|doc|>\n"
_N_DOCUMENTS, _CHARACTERS_OF_A_BOOK = 2000, 400_000
"""Most documents of a kind, and most characters of each novel."""


def chat_rows(data: Path, name: str) -> Iterator[dict[str, Any]]:
    """Yield the conversations of a chat set."""
    with (data / "chat" / f"{name}.jsonl").open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def chat_lines(data: Path, name: str) -> list[list[str]]:
    """Return the lines of each conversation of a chat set, each with its speaker."""
    return [
        [_line(turn["role"], turn["content"]) for turn in row["turns"]]
        for row in chat_rows(data, name)
    ]


def documents_by_kind(data: Path) -> dict[str, list[str]]:
    """Return some documents of each kind of text; the reference model was trained on the first."""
    news = (data / "tasks/ag_news_test.jsonl").open(encoding="utf-8")
    with news:
        stories = [f"{row['title']}\n{row['text']}" for row in map(json.loads, news)]
    return {
        "the training text's kind": read_documents(data / VALIDATION_TEXT),
        "service dialogs": _chat_documents(data, "sgd_dev"),
        "novels": [book[:_CHARACTERS_OF_A_BOOK] for book in books(data)],
        "news": stories[:_N_DOCUMENTS],
        "instructions with answers": _chat_documents(data, "alpaca_a"),
        "encyclopedia": [wikitext(data)],
    }


def books(data: Path) -> list[str]:
    """Return the texts of the novels."""
    return [path.read_text("utf-8", "ignore") for path in sorted((data / "lm/books").glob("*.txt"))]


def wikitext(data: Path) -> str:
    """Return the validation part of WikiText-2."""
    return (data / "lm/wikitext2_valid.txt").read_text("utf-8", "ignore")


def read_documents(path: Path, n_characters: int | None = None) -> list[str]:
    """Read a text, or its first ``n_characters``, and split it at lines of ``<|doc|>``.

    Args:
        path: Text file, compressed with xz if the name ends in ``.xz``.
        n_characters: Characters to read; None reads all.

    Raises:
        OSError: The file cannot be read.
    """
    opener = lzma.open if path.suffix == ".xz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        return str(file.read(n_characters)).split(_DOCUMENT)


def packaged_chats() -> list[Path]:
    """Return the files of the packaged conversations, which are in no data set."""
    return sorted((Path(str(files("llmaas_plugins.demo"))) / "conversations").glob("*.jsonl"))


def packaged_lines() -> list[list[str]]:
    """Return the lines of the packaged conversations, each with its speaker."""
    return [
        [_line(message.role, message.content) for message in talk.messages]
        for path in packaged_chats()
        for talk in load_conversations(path)
    ]


def packaged_documents() -> list[str]:
    """Return the packaged conversations as documents."""
    return ["\n".join(lines) for lines in packaged_lines()]


def _chat_documents(data: Path, name: str) -> list[str]:
    return ["\n".join(lines) for lines in chat_lines(data, name)[:_N_DOCUMENTS]]


def _line(role: str, content: str) -> str:
    return f"{role.capitalize()}: {' '.join(content.split())}"
