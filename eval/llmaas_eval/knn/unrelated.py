"""Text unrelated to any user, on which mixing must do no harm."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from llmaas_eval.data import books, wikitext
from llmaas_eval.knn.encoder import Encoder
from llmaas_eval.knn.keys import Part, as_part

__all__ = ["UNRELATED", "unrelated"]

UNRELATED = ("novels", "wikitext")
_N_PIECES, _PIECE = 12, 2400
"""Pieces of each kind of text, and characters of a piece."""


def unrelated(data: Path, encoder: Encoder) -> dict[str, Part]:
    """Encode pieces spread over the novels and over WikiText-2's validation part, by name."""
    texts = {"novels": books(data), "wikitext": [_plain(wikitext(data))]}
    return {
        name: as_part(encoder, [piece for text in some for piece in _pieces(text, len(some))])
        for name, some in texts.items()
    }


def _pieces(text: str, n_texts: int) -> list[str]:
    """Return pieces spread evenly over ``text``, away from its beginning and end."""
    n = max(1, _N_PIECES // n_texts)
    starts = np.linspace(0, len(text), n + 2)[1:-1].astype(int)
    return [text[start : start + _PIECE] for start in starts]


def _plain(text: str) -> str:
    """Remove WikiText's markup, as in the reference model's training text."""
    return re.sub(r" @(.)@ ", r"\1", text).replace("<unk>", "")
