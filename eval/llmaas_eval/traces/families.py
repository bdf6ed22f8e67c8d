"""The six kinds of tasks of LLMS Table 3, and their texts from available data sets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["FAMILIES", "Family", "Texts", "family_texts"]

_CHARS_PER_TOKEN = 4
_NEWS = {1: "World", 2: "Sports", 3: "Business", 4: "Sci/Tech"}

_Row = tuple[str, str]
"""A question with its text, and the correct answer."""


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of task.

    Attributes:
        low: Fewest tokens that a call adds to its context.
        high: Most tokens that a call adds to its context.
        reply_share: Reply's share of these tokens; our choice, as the paper gives only the sums.
        files: File name pattern of the data set, a substitute for the paper's.
    """

    low: int
    high: int
    reply_share: float
    files: str

    @property
    def mean(self) -> float:
        """Mean number of tokens that a call adds."""
        return (self.low + self.high) / 2


FAMILIES: Mapping[str, Family] = {
    "news": Family(200, 500, 0.02, "ag_news_*.jsonl"),
    "summary": Family(1000, 2000, 0.1, "qmsum_*.jsonl"),
    "chat": Family(100, 300, 0.2, "dialogsum_*.jsonl"),
    "comprehension": Family(500, 1000, 0.02, "boolq_*.jsonl"),
    "translation": Family(100, 500, 0.5, "multi30k_*.jsonl"),
    "sentiment": Family(10, 100, 0.05, "sst2_*.jsonl"),
}


class Texts:
    """A family's questions in order, concatenated and cut to the length of each call."""

    def __init__(self, rows: list[_Row], start: float) -> None:
        """Begin at share ``start`` of ``rows``, from 0 to 1."""
        self._rows = rows
        self._next = int(start * len(rows))

    def take(self, n_tokens: int) -> _Row:
        """Return questions cut to about ``n_tokens`` together, and their answers."""
        room, questions, answers = n_tokens * _CHARS_PER_TOKEN, list[str](), list[str]()
        while room > 0:
            question, answer = self._rows[self._next % len(self._rows)]
            self._next += 1
            questions.append(question[:room])
            answers.append(answer)
            room -= len(question) + 1
        return "\n".join(questions), "\n".join(answers)


def family_texts(folder: Path, family: str) -> list[_Row]:
    """Read the questions and answers of ``family`` from the files in ``folder``.

    Raises:
        FileNotFoundError: ``folder`` has no data set of the family.
    """
    pattern = FAMILIES[family].files
    rows = [row for path in sorted(folder.glob(pattern)) for row in _rows(path, _READERS[family])]
    if not rows:
        raise FileNotFoundError(f"{folder} has no rows in {pattern}, expected some for {family!r}")
    return rows


def _rows(path: Path, reader: Callable[[dict[str, Any]], Iterator[_Row]]) -> Iterator[_Row]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield from reader(json.loads(line))


def _news(row: dict[str, Any]) -> Iterator[_Row]:
    yield f"{row['title']}\n{row['text']}\nCategory:", _NEWS[row["label"]]


def _summary(row: dict[str, Any]) -> Iterator[_Row]:
    meeting = "\n".join(f"{turn['role']}: {turn['content']}" for turn in row["turns"])
    for query in row["queries"]:
        yield f"{query['query']}\n{meeting}", query["answer"]


def _chat(row: dict[str, Any]) -> Iterator[_Row]:
    summary = row["summary"] if "summary" in row else row["summary1"]
    yield f"{row['dialogue']}\nSummary:", summary


def _comprehension(row: dict[str, Any]) -> Iterator[_Row]:
    yield row["instruction"], row["answer"]


def _translation(row: dict[str, Any]) -> Iterator[_Row]:
    yield f"{row['de']}\nEnglish:", row["en"]


def _sentiment(row: dict[str, Any]) -> Iterator[_Row]:
    yield f"{row['text']}\nSentiment:", "positive" if row["label"] else "negative"


_READERS: Mapping[str, Callable[[dict[str, Any]], Iterator[_Row]]] = {
    "news": _news,
    "summary": _summary,
    "chat": _chat,
    "comprehension": _comprehension,
    "translation": _translation,
    "sentiment": _sentiment,
}
