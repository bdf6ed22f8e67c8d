"""Windows of tokens to test and to calibrate with."""

from __future__ import annotations

import contextlib
import lzma
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from llmaas_eval.tolerance.texts import packaged_lines

__all__ = ["Windows", "packaged_documents", "read_documents", "windows_of"]

_DOCUMENT = "\n<|doc|>\n"
_CHARACTERS_PER_TOKEN = 6

Windows = NDArray[np.int32]
"""Token ids, shape ``(n_windows, n_tokens)``; each window begins with the BOS token."""


def read_documents(path: Path, n_tokens: int) -> list[str]:
    """Read the beginning of a text and split it at lines of ``<|doc|>``.

    Args:
        path: Text file, compressed with xz if the name ends in ``.xz``.
        n_tokens: Tokens to read from the beginning. The estimate is 6 characters a token, more
            than usual, so that enough are read.

    Raises:
        OSError: The file cannot be read.
    """
    opener = lzma.open if path.suffix == ".xz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        return str(file.read(_CHARACTERS_PER_TOKEN * n_tokens)).split(_DOCUMENT)


def packaged_documents() -> list[str]:
    """Return the packaged conversations as documents."""
    return ["\n".join(lines) for lines in packaged_lines()]


def windows_of(model: Path, documents: list[str], n_windows: int, n_tokens: int) -> Windows:
    """Concatenate documents, cut them into windows, and pick windows evenly spread over them.

    Args:
        model: GGUF file with the vocabulary.
        documents: Texts.
        n_windows: Most windows to return.
        n_tokens: Tokens of each window, with the BOS token.

    Raises:
        ValueError: The documents are shorter than a window.
    """
    with contextlib.closing(
        llama_cpp.Llama(str(model), vocab_only=True, verbose=False)
    ) as tokenizer:
        stream = chain.from_iterable(
            tokenizer.tokenize(f"{text}\n".encode(), add_bos=False) for text in documents
        )
        rows = [[tokenizer.token_bos(), *row] for row in _cut(stream, n_tokens - 1)]
    if not rows:
        raise ValueError(f"the text is shorter than {n_tokens} tokens")
    picks = np.linspace(0, len(rows) - 1, min(n_windows, len(rows))).round().astype(int)
    return np.array(rows, np.int32)[picks]


def _cut(stream: Iterator[int], size: int) -> Iterator[list[int]]:
    while len(row := list(islice(stream, size))) == size:
        yield row
