"""The tables of docs/reference/compatibility.md, built from the outcomes of marked tests.

``@pytest.mark.compat(table, row, column, cell)`` names the cell's content if the test passes.
Several tests may share a cell. All must pass and must name the same content.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "compatibility.md"
_TABLE = re.compile(r"<!-- table: (\w+) -->\n(.*?)<!-- /table -->", re.DOTALL)


class CompatTables:
    """Pytest plugin that collects cells and writes them with ``--write-compat``."""

    def __init__(self):
        self.cells = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        for mark in item.iter_markers("compat"):
            if call.excinfo is not None or call.when == "call":
                self._fill(mark.args, _outcome(report, mark.args[3]))
        return report

    def pytest_sessionfinish(self, session):
        if session.config.getoption("--write-compat"):
            PAGE.write_text(_TABLE.sub(self._written, PAGE.read_text()))

    def _fill(self, place, cell):
        table, row, column, promised = place
        cells = self.cells.setdefault(table, {})
        if cells.get((row, column), promised) == promised:  # keep the cell of a failed test visible
            cells[row, column] = cell

    def _written(self, found):
        name = found[1]
        table = as_markdown(self.cells.get(name, {}))
        return f"<!-- table: {name} -->\n\n{table}\n<!-- /table -->"


def _outcome(report, cell):
    if report.skipped:
        return "not run"
    return cell if report.passed else "**fails**"


def as_markdown(cells):
    """Return a Markdown table of ``{(row, column): cell}``, rows and columns in insertion order."""
    rows, columns = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
    lines = [["", *columns], ["---"] * (len(columns) + 1)]
    lines += [[row, *(cells.get((row, column), "–") for column in columns)] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def documented(name):
    """Return a documented table as ``{(row, column): cell}``, without empty cells."""
    (text,) = [body for table, body in _TABLE.findall(PAGE.read_text()) if table == name]
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line]
    header, _, *rows = lines or [[], []]
    columns = [cell.strip() for cell in header if cell.strip()]
    return {
        (row.strip(), column): cell.strip()
        for row, *cells in rows
        for column, cell in zip(columns, cells, strict=True)
        if cell.strip() != "–"
    }
