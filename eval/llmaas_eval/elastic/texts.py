"""Windows of tokens to test and to calibrate with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["Windows", "windows_of"]

Windows = NDArray[np.int32]
"""Token ids, shape ``(n_windows, n_tokens)``; each window begins with the BOS token."""


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
    from llama_cpp import Llama  # not needed where the tokens are kept

    with contextlib.closing(Llama(str(model), vocab_only=True, verbose=False)) as tokenizer:
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
