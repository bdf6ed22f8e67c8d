"""Tables of studies, and numbers as their cells show them.

Each study's ``report`` has ``TABLES``: a function for each table in ``eval/results``, which makes
the table from the JSON that the study wrote. The study's own report shows the same tables.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llmaas_eval import markdown

__all__ = [
    "Maker",
    "NoRowsError",
    "Output",
    "Table",
    "as_markdown",
    "between",
    "bold",
    "number",
    "only",
    "parse_interval",
    "percent",
    "read_output",
    "signed",
    "spread",
]

Output = Mapping[str, Any]
"""JSON document that a study wrote."""

_MINUS = "\N{MINUS SIGN}"


class NoRowsError(ValueError):
    """The outputs have no rows for a table."""


class Table(NamedTuple):
    """A table as text.

    Attributes:
        columns: Heads of the columns.
        rows: Cells of each row.
        align: Alignment of each column: ``l`` for text, ``r`` for numbers.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    align: str

    def as_markdown(self) -> str:
        """Return the table in Markdown."""
        return markdown.table(self.columns, self.rows, self.align)


Maker = Callable[[Sequence[Output]], Table]
"""Function that makes a table of a study's outputs."""


def read_output(path: Path) -> Output:
    """Read the JSON that a study wrote.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not a JSON object.
    """
    document = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict):
        raise ValueError("found no JSON object")  # noqa: TRY004  the file's content is wrong
    return document


def only(outputs: Sequence[Output]) -> Output:
    """Return the output of a table that is made of one.

    Raises:
        ValueError: There are several.
    """
    if len(outputs) != 1:
        raise ValueError(f"found {len(outputs)} outputs, expected one")
    return outputs[0]


def as_markdown(makers: Mapping[str, Maker], outputs: Sequence[Output]) -> str:
    """Return those tables in Markdown that the outputs have rows for."""
    parts = []
    for name, make in makers.items():
        try:
            parts.append(f"{name}:\n\n{make(outputs).as_markdown()}")
        except NoRowsError:
            continue
    return "\n\n".join(parts)


def number(value: float, digits: int | None = None) -> str:
    """Return a number with these digits after the point; by default with three digits in all."""
    return f"{value:.{_digits(value) if digits is None else digits}f}".replace("-", _MINUS)


def signed(value: float, digits: int | None = None) -> str:
    """Return a number as ``number`` does, with its sign."""
    return f"{value:+.{_digits(value) if digits is None else digits}f}".replace("-", _MINUS)


def percent(share: float, digits: int = 0) -> str:
    """Return a share in percent."""
    return f"{number(100 * share, digits)} %"


def spread(found: Iterable[float], digits: int | None = None, unit: str = "") -> str:
    """Return a value, its ``unit``, and the limits of its interval, all with their signs.

    By default, the value has three digits, and the limits have as many after the point.
    """
    value, low, high = found
    digits = _digits(value) if digits is None else digits
    cells = [signed(each, digits) for each in (value, low, high)]
    return f"{cells[0]}{unit} ({cells[1]} to {cells[2]})"


def between(found: Iterable[float], digits: int | None = None, unit: str = "") -> str:
    """Return a value, its ``unit``, and the limits of its interval; none of them is negative."""
    value, low, high = found
    digits = _digits(value) if digits is None else digits
    return f"{value:.{digits}f}{unit} ({low:.{digits}f}–{high:.{digits}f})"


def parse_interval(text: str) -> tuple[float, float, float]:
    """Return the three numbers of a text such as ``12.3 [11.9 12.8]`` or ``1.02 (0.98 to 1.05)``.

    Raises:
        ValueError: The text has fewer or more numbers.
    """
    found = [float(each) for each in re.findall(r"[-+]?\d[\d.]*(?:e[-+]?\d+)?", text)]
    if len(found) != 3:
        raise ValueError(f"found {text!r}, expected a median and two limits")
    return found[0], found[1], found[2]


def bold(text: str) -> str:
    """Return the text in bold, up to its interval."""
    value, bracket, limits = text.partition(" (")
    return f"**{value}**{bracket}{limits}"


def _digits(value: float) -> int:
    return 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
