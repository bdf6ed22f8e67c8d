"""Markdown tables of all studies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["table"]


def table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; the first column is text, the others are numbers."""
    rule = f"|---{'|---:' * (len(heads) - 1)}|"
    return "\n".join([_line(heads), rule, *map(_line, lines)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
