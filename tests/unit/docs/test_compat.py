"""The tables of docs/reference/compatibility.md, against those of the tests."""

from __future__ import annotations

from compat import documented


def test_tables(request):
    """Each marked test of this run has its cell; a full run knows every cell."""
    marked = {}
    for item in request.session.items:
        for mark in item.iter_markers("compat"):
            table, row, column, cell = mark.args
            assert marked.setdefault((table, row, column), cell) == cell
    known = {
        (table, *place): cell
        for table in ("clients", "models")
        for place, cell in documented(table).items()
    }
    again = "run `make compat`"
    assert {place: known.get(place) for place in marked} == marked, again
    is_full_run = request.config.args == request.config.getini("testpaths")
    if is_full_run and not request.config.getoption("-m") and not request.config.getoption("-k"):
        assert set(known) == set(marked), again
