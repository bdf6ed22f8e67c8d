"""Outputs of studies, and the tables that are made of them."""

from __future__ import annotations

import json
import re

from llmaas_eval.keeping import kept, makers
from llmaas_eval.results import about, load


def made(name, *documents, same_columns=True):
    """Return the rows of a table made of these documents, which are written as JSON and read.

    The table can be kept. Unless ``same_columns`` is false, it has the committed result's form.
    """
    outputs = [json.loads(json.dumps(about() | document)) for document in documents]
    table = makers()[name](outputs)
    if same_columns:
        committed = load(name)
        assert (list(table.columns), table.align) == (committed.columns, committed.align)
    assert kept(table, outputs, ["a.json"])["rows"] == [list(row) for row in table.rows]
    return [list(row) for row in table.rows]


def committed_rows(name):
    """Return the rows of a committed result."""
    return [list(row) for row in load(name).rows]


def figure(name, rows):
    return {"settings": {"figure": name}, "rows": rows}


def numbers(cell):
    """Return a cell's numbers."""
    cell = cell.replace("−", "-").replace(",", "")
    return [float(each) for each in re.findall(r"[-+]?\d[\d.]*", cell)]


def form(cell):
    """Return a cell with each number replaced by how many digits follow its point."""
    return re.sub(r"[+−]?\d[\d,]*(?:\.(\d+))?", lambda found: f"#{len(found[1] or '')}", cell)


def forms(rows):
    return [[form(cell) for cell in row] for row in rows]
