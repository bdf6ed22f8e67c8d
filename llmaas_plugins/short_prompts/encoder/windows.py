"""Overlapping windows over a text that is longer than an encoder can read at once."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["MOST_POSITIONS", "OVERLAP", "Window", "windows_of"]

MOST_POSITIONS = 256
"""Most pieces of a window, with the two that mark its ends.

Attention makes longer windows slower for each piece. llama.cpp also reserves logits of the whole
vocabulary for each piece, which nothing reads: 31 MB for 256 pieces.
"""
OVERLAP = 64
"""Pieces that two windows share."""


class Window(NamedTuple):
    """Part of a text.

    Attributes:
        start: First piece that is read.
        end: Piece after the last one that is read.
        first: First piece whose output counts: others are nearer to the middle of another window.
        last: Piece after the last one whose output counts.
    """

    start: int
    end: int
    first: int
    last: int


def windows_of(n_pieces: int, most: int, overlap: int = OVERLAP) -> list[Window]:
    """Divide a text into windows of about equal lengths; each piece counts in one of them.

    Args:
        n_pieces: Pieces of the text.
        most: Most pieces of a window; more than ``overlap``.
        overlap: Pieces that two neighbors share, or one more.
    """
    if n_pieces <= most:
        return [Window(0, n_pieces, 0, n_pieces)] if n_pieces else []
    n = -(-(n_pieces - overlap) // (most - overlap))
    own = n_pieces - overlap  # pieces by which windows advance, all together
    starts = [own * i // n for i in range(n)]
    ends = [own * (i + 1) // n + overlap for i in range(n)]
    borders = [0, *((s + e) // 2 for s, e in zip(starts[1:], ends, strict=False)), n_pieces]
    return list(map(Window, starts, ends, borders, borders[1:]))
