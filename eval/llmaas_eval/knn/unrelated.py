"""Text that has nothing to do with any user: what mixing must not harm."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from llmaas_eval.knn.encoder import Encoder
from llmaas_eval.knn.keys import Part, as_part

__all__ = ["UNRELATED", "unrelated"]

UNRELATED = ("novels", "wikitext")
_N_PIECES, _PIECE = 12, 2400
"""Of each: pieces, and characters of a piece."""


def unrelated(data: Path, encoder: Encoder) -> dict[str, Part]:
    """Pieces from all over the novels and from all over WikiText-2's validation part, by name."""
    folder = data / "lm"
    texts = {
        "novels": [path.read_text(errors="ignore") for path in sorted(folder.glob("books/*.txt"))],
        "wikitext": [_plain((folder / "wikitext2_valid.txt").read_text(encoding="utf-8"))],
    }
    return {
        name: as_part(encoder, [piece for text in some for piece in _pieces(text, len(some))])
        for name, some in texts.items()
    }


def _pieces(text: str, n_texts: int) -> list[str]:
    """Pieces as far from each other as can be, and from the beginning."""
    n = max(1, _N_PIECES // n_texts)
    starts = np.linspace(0, len(text), n + 2)[1:-1].astype(int)
    return [text[start : start + _PIECE] for start in starts]


def _plain(text: str) -> str:
    """WikiText's marks undone, as in what the reference model was trained on."""
    return re.sub(r" @(.)@ ", r"\1", text).replace("<unk>", "")
