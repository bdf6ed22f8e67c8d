"""Validation and calibration text as tokens: windows and contexts of one length."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.data import TRAINING_TEXT, VALIDATION_TEXT, read_documents, wikitext

__all__ = ["Texts", "Tokens", "read_texts"]

_ARTICLE = re.compile(r"\n(?= = [^=])")
_N_CALIBRATION_CHARACTERS = 4_000_000

Tokens = NDArray[np.int64]
"""Token ids of shape ``(n, n_tokens)``; each row begins with the begin-of-sequence token."""

_Tokenize = Callable[[str], list[int]]


class Texts(NamedTuple):
    """Texts that the model reads.

    Attributes:
        windows: Windows of validation text, document after document.
        calibration: Windows of training text.
        contexts: Beginnings of documents of validation text, by data set.
    """

    windows: Tokens
    calibration: Tokens
    contexts: dict[str, Tokens]


def read_texts(data: Path, model: Path, n_windows: int, n_contexts: int, n_tokens: int) -> Texts:
    """Read the texts in folder ``data`` and tokenize them for ``model``, a GGUF file.

    Raises:
        FileNotFoundError: The folder has no data sets.
    """
    if not (data / "lm").is_dir():
        raise FileNotFoundError(
            f"no folder {data / 'lm'}; run this in the repository, or give --data"
        )
    held = read_documents(data / VALIDATION_TEXT)
    wiki = _ARTICLE.split(wikitext(data))
    training = read_documents(data / TRAINING_TEXT, _N_CALIBRATION_CHARACTERS)
    from llama_cpp import Llama

    with contextlib.closing(Llama(str(model), vocab_only=True, verbose=False)) as llama:

        def tokenize(text: str) -> list[int]:
            return list(llama.tokenize(text.encode(), add_bos=False))

        bos = llama.token_bos()
        return Texts(
            _rows(bos, _windows(tokenize, held, n_tokens - 1), n_windows),
            _rows(bos, _windows(tokenize, training, n_tokens - 1), n_windows),
            {
                name: _rows(bos, _beginnings(tokenize, documents, n_tokens - 1), n_contexts)
                for name, documents in (("chats", held), ("articles", wiki))
            },
        )


def _windows(tokenize: _Tokenize, documents: Iterable[str], size: int) -> Iterator[list[int]]:
    stream = chain.from_iterable(tokenize(f"{text}\n") for text in documents)
    while len(window := list(islice(stream, size))) == size:
        yield window


def _beginnings(tokenize: _Tokenize, documents: Iterable[str], size: int) -> Iterator[list[int]]:
    """Yield the first ``size`` tokens of each document that has so many."""
    for text in documents:
        if len(tokens := tokenize(text)) >= size:
            yield tokens[:size]


def _rows(bos: int, rows: Iterable[list[int]], n: int) -> Tokens:
    return np.array([[bos, *row] for row in islice(rows, n)], np.int64)
