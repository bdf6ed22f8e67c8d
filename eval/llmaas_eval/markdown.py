"""Markdown tables of all studies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["table"]

_RULE = {"l": "---", "r": "---:"}


def table(heads: Sequence[str], lines: Iterable[Sequence[str]], align: str = "") -> str:
    """Return a Markdown table.

    Args:
        heads: Heads of the columns.
        lines: Cells of each line.
        align: ``l`` for each column of text and ``r`` for each column of numbers. By default, the
            first column is text, and the others are numbers.
    """
    rules = [_RULE[kind] for kind in align or "l".ljust(len(heads), "r")]
    return "\n".join([_line(heads), f"|{'|'.join(rules)}|", *map(_line, lines)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
