"""Cost and perplexity of each way to free cells of a window.

Long texts are read line by line through a window of cells. When the window is full, the oldest
lines are removed until half of it is free. One way evaluates the remaining lines again, as the
service does. The other ways move their cells to the front, behind the first few tokens (attention
sinks) or none. All ways see the same lines, so they differ only in cells that depended on removed
ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from llmaas_eval.stats import median_interval
from llmaas_patches.internals import decode_all
from llmaas_plugins.chats.exports import load_conversations

__all__ = ["WAYS", "Reader", "Row", "Way", "cut", "measure", "texts_of"]

_LONGEST_LINE = 64
_MOST_SINKS = 16

Line = list[int]


class Way(NamedTuple):
    """A way to free cells of the window.

    Attributes:
        name: Name in tables.
        n_sinks: Number of first tokens whose cells stay when cells are moved. With ``None``, the
            remaining lines are evaluated again after the first token.
        is_limited: Whether the way uses a window; if not, no cell is ever removed.
    """

    name: str
    n_sinks: int | None = None
    is_limited: bool = True


WAYS = (
    Way("evaluated again"),
    Way("moved, no sinks", 0),
    Way("moved, 4 sinks", 4),
    Way("moved, 16 sinks", _MOST_SINKS),
    Way("without a window", is_limited=False),
)


@dataclass(frozen=True, slots=True)
class Row:
    """Result of one way over all texts.

    Only lines after the window was full for the first time count.

    Attributes:
        name: Name of the way.
        perplexity: Perplexity of those lines.
        against_first: Perplexity over the first way's: the median of the texts and its 95 %
            interval.
        evaluated: Tokens evaluated for each token of those lines.
    """

    name: str
    perplexity: float
    against_first: tuple[float, float, float]
    evaluated: float


class Reader:
    """A context of an engine that reads a text line by line through a window."""

    def __init__(self, llama: Any, n_window: int, way: Way) -> None:
        """Clear ``llama``'s context and use ``n_window`` of its cells as the window."""
        self._llama, self._n_window, self._way = llama, n_window, way
        self._memory = llama_cpp.llama_get_memory(llama.ctx)
        self._lines: list[Line] = []
        self.n_cells = self.n_evaluated = 0
        self._clear()

    def read(self, line: Line) -> NDArray[np.float64]:
        """Evaluate a line; return log probabilities of all its tokens but the first.

        The shape is ``(len(line) - 1,)``.
        """
        logits = self._evaluate(line)[:-1]
        self._lines.append(line)
        best = logits.max(axis=1, keepdims=True)
        total = np.log(np.exp(logits - best).sum(axis=1)) + best[:, 0]
        found: NDArray[np.float64] = logits[np.arange(len(line) - 1), line[1:]] - total
        return found

    def has_room(self, line: Line) -> bool:
        """Return whether ``line`` fits into the window beside the largest number of sinks."""
        n_lines = sum(map(len, self._lines))
        return n_lines + len(line) + _MOST_SINKS <= self._n_window

    def make_room(self) -> None:
        """Remove the oldest lines until half of the window is free."""
        lengths = list(itertools.accumulate(len(line) for line in reversed(self._lines)))
        n_kept = sum(length <= self._n_window // 2 for length in lengths)
        self._lines = self._lines[len(self._lines) - n_kept :]
        if not self._way.is_limited:
            return
        if self._way.n_sinks is None:
            self._clear()
            for line in self._lines:
                self._evaluate(line)
        else:
            self._move(self._way.n_sinks, self.n_cells - sum(map(len, self._lines)))

    def _clear(self) -> None:
        llama_cpp.llama_memory_clear(self._memory, True)
        self.n_cells = 0
        self._evaluate([self._llama.token_bos()])

    def _move(self, start: int, end: int) -> None:
        """Remove the cells from ``start`` to ``end`` and move later cells to their place."""
        if end <= start:  # in a short window, the sinks themselves can be among the kept lines
            return
        llama_cpp.llama_memory_seq_rm(self._memory, 0, start, end)
        llama_cpp.llama_memory_seq_add(self._memory, 0, end, -1, start - end)
        self.n_cells -= end - start

    def _evaluate(self, tokens: Line) -> NDArray[np.float64]:
        llama = self._llama
        decode_all(llama, tokens, self.n_cells)
        self.n_cells += len(tokens)
        self.n_evaluated += len(tokens)
        rows = llama_cpp.llama_get_logits(llama.ctx)
        shape = (len(tokens), llama.n_vocab())
        return np.ctypeslib.as_array(rows, shape=shape).astype(np.float64)


class _Reading(NamedTuple):
    """One text read in one way, from when the window was full for the first time."""

    log_probabilities: NDArray[np.float64]
    n_tokens: int
    n_evaluated: int


def cut(llama: Any, text: str, n_tokens: int) -> list[list[Line]]:
    """Tokenize ``text`` into lines, in pieces of at least ``n_tokens``.

    The end of the text is left out if it is too short for a piece.
    """
    pieces: list[list[Line]] = [[]]
    line: Line = []
    for token in llama.tokenize(text.encode(), add_bos=False):
        line.append(token)
        if llama.detokenize([token]).endswith(b"\n") or len(line) == _LONGEST_LINE:
            pieces[-1].append(line)
            line = []
            if sum(map(len, pieces[-1])) >= n_tokens:
                pieces.append([])
    return pieces[:-1]


def measure(llama: Any, texts: Sequence[Sequence[Line]], n_window: int) -> list[Row]:
    """Read the texts in each way.

    The way without a window is left out if the engine's context is too short for the longest text.

    Raises:
        ValueError: There is no text, or a text is not longer than the window.
    """
    if not texts:
        raise ValueError("no file has a text that long; lower --tokens")
    longest = 1 + max(sum(map(len, lines)) for lines in texts)
    readings = {
        way.name: [_read(Reader(llama, n_window, way), lines) for lines in texts]
        for way in WAYS
        if way.is_limited or longest <= llama.n_ctx()
    }
    first = np.array([r.log_probabilities.mean() for r in readings[WAYS[0].name]])
    rows = []
    for name, found in readings.items():
        own = np.array([reading.log_probabilities.mean() for reading in found])
        everything = np.concatenate([reading.log_probabilities for reading in found])
        rows.append(
            Row(
                name,
                float(np.exp(-everything.mean())),
                median_interval(np.exp(first - own)),
                sum(r.n_evaluated for r in found) / sum(r.n_tokens for r in found),
            )
        )
    return rows


def _read(reader: Reader, lines: Iterable[Line]) -> _Reading:
    found: list[NDArray[np.float64]] = []
    n_tokens, n_before = 0, None
    for line in lines:
        if not reader.has_room(line):
            n_before = reader.n_evaluated if n_before is None else n_before
            reader.make_room()
        log_probabilities = reader.read(line)
        if n_before is not None:
            found.append(log_probabilities)
            n_tokens += len(line)
    if n_before is None:
        raise ValueError("a text is not longer than the window; raise --tokens")
    return _Reading(np.concatenate(found), n_tokens, reader.n_evaluated - n_before)


def texts_of(llama: Any, data: Sequence[Path], n_tokens: int, n_texts: int) -> Iterator[list[Line]]:
    """Yield pieces of at least ``n_tokens`` of each file, text or conversations, as lines."""
    for path in data:
        if path.suffix == ".txt":
            text = path.read_text()
        else:
            messages = (m for talk in load_conversations(path) for m in talk.messages)
            text = "".join(f"{m.role.capitalize()}: {m.content}\n" for m in messages)
        yield from cut(llama, text[: 8 * n_texts * n_tokens], n_tokens)[:n_texts]
