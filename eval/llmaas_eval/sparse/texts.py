"""Validation and calibration text as tokens: windows and contexts of one length."""

from __future__ import annotations

import contextlib
import lzma
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["DATA", "Texts", "Tokens", "read_texts"]

DATA = Path("../shared/data")
"""Folder of the data sets, relative to the repository."""

_DOCUMENT, _ARTICLE = "\n<|doc|>\n", re.compile(r"\n(?= = [^=])")
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
    folder = data / "lm"
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}; run this in the repository, or give --data")
    held = (folder / "reference_val.txt").read_text(encoding="utf-8").split(_DOCUMENT)
    wiki = _ARTICLE.split((folder / "wikitext2_valid.txt").read_text(encoding="utf-8"))
    with lzma.open(folder / "reference_train.txt.xz", "rt", encoding="utf-8") as file:
        training = file.read(_N_CALIBRATION_CHARACTERS).split(_DOCUMENT)
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
