"""Text in tokens: windows to be read, and a stream to calibrate with."""

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
"""Shape ``(n_windows, n_tokens)``: each begins with the token that begins a sequence."""


def read_documents(path: Path, n_tokens: int) -> list[str]:
    """Documents of a text, split at lines of ``<|doc|>``: surely ``n_tokens`` long if it is.

    Args:
        path: Text; packed with xz if it is so called.
        n_tokens: How much is wanted of its beginning.

    Raises:
        OSError: It cannot be read.
    """
    opener = lzma.open if path.suffix == ".xz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        return str(file.read(_CHARACTERS_PER_TOKEN * n_tokens)).split(_DOCUMENT)


def packaged_documents() -> list[str]:
    """The suite's own conversations."""
    return ["\n".join(lines) for lines in packaged_lines()]


def windows_of(model: Path, documents: list[str], n_windows: int, n_tokens: int) -> Windows:
    """Cut documents, one behind the other, and take windows evenly spread over them.

    Args:
        model: GGUF with the vocabulary.
        documents: Text.
        n_windows: As many, or as there are.
        n_tokens: Of each.

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
