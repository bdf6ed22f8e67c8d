"""Validation and calibration text in tokens: windows and contexts of one length."""

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
"""Where the data sets lie, seen from the repository."""

_DOCUMENT, _ARTICLE = "\n<|doc|>\n", re.compile(r"\n(?= = [^=])")
_N_CALIBRATION_CHARACTERS = 4_000_000

Tokens = NDArray[np.int64]
"""Shape ``(n, n_tokens)``: each row begins with the token that begins a sequence."""

_Tokenise = Callable[[str], list[int]]


class Texts(NamedTuple):
    """What is read by the model.

    Attributes:
        windows: Of validation text, document after document.
        calibration: Of training text.
        contexts: Beginnings of documents of validation text, by the set that they are of.
    """

    windows: Tokens
    calibration: Tokens
    contexts: dict[str, Tokens]


def read_texts(data: Path, model: Path, n_windows: int, n_contexts: int, n_tokens: int) -> Texts:
    """Read from folder ``data``, in the vocabulary of ``model``, a GGUF.

    Raises:
        FileNotFoundError: The data sets are not there.
    """
    folder = data / "lm"
    if not folder.is_dir():
        raise FileNotFoundError(f"No folder {folder}: run this in the repository, or give --data")
    held = (folder / "reference_val.txt").read_text(encoding="utf-8").split(_DOCUMENT)
    wiki = _ARTICLE.split((folder / "wikitext2_valid.txt").read_text(encoding="utf-8"))
    with lzma.open(folder / "reference_train.txt.xz", "rt", encoding="utf-8") as file:
        training = file.read(_N_CALIBRATION_CHARACTERS).split(_DOCUMENT)
    from llama_cpp import Llama

    with contextlib.closing(Llama(str(model), vocab_only=True, verbose=False)) as llama:

        def tokenise(text: str) -> list[int]:
            return list(llama.tokenize(text.encode(), add_bos=False))

        bos = llama.token_bos()
        return Texts(
            _rows(bos, _windows(tokenise, held, n_tokens - 1), n_windows),
            _rows(bos, _windows(tokenise, training, n_tokens - 1), n_windows),
            {
                name: _rows(bos, _beginnings(tokenise, documents, n_tokens - 1), n_contexts)
                for name, documents in (("chats", held), ("articles", wiki))
            },
        )


def _windows(tokenise: _Tokenise, documents: Iterable[str], size: int) -> Iterator[list[int]]:
    stream = chain.from_iterable(tokenise(f"{text}\n") for text in documents)
    while len(window := list(islice(stream, size))) == size:
        yield window


def _beginnings(tokenise: _Tokenise, documents: Iterable[str], size: int) -> Iterator[list[int]]:
    """Of those documents that are long enough."""
    for text in documents:
        if len(tokens := tokenise(text)) >= size:
            yield tokens[:size]


def _rows(bos: int, rows: Iterable[list[int]], n: int) -> Tokens:
    return np.array([[bos, *row] for row in islice(rows, n)], np.int64)
