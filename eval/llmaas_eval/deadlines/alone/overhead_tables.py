"""Tables of the memory and the time of serving several sizes of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from llmaas_eval.deadlines.alone.overhead import (
    ALL_KEPT,
    COPIED,
    FROM_CACHE,
    FROM_DISK,
    STAYING,
    STOCK,
    SWAPPED,
    SWITCHED,
    WITH_LEVELS,
)
from llmaas_eval.stats import median_interval
from llmaas_eval.tables import Maker, NoRowsError, Output, Table, between, number, only, percent

__all__ = ["TABLES"]

_MEMORY = (STOCK, WITH_LEVELS, SWAPPED, ALL_KEPT)
_SWITCHING = (SWITCHED, STAYING, FROM_CACHE, FROM_DISK, COPIED)
_DIGITS = {SWITCHED: 2, STAYING: 2}


def _memory(outputs: Sequence[Output]) -> Table:
    """Show the peak memory of each way to serve all levels."""
    rows = [row for row in only(outputs)["rows"] if row["row"] == "memory"]
    if not rows:
        raise NoRowsError("no rows of memory")
    peaks = {row["way"]: np.array(row["bytes"], np.float64) for row in rows}
    lines = [
        [
            way,
            f"{np.median(peaks[way]) / 2**20:,.0f}",
            between(median_interval(peaks[way] / peaks[STOCK]), 3),
        ]
        for way in _MEMORY
    ]
    return Table(["served by", "peak, MiB", "over the whole model alone"], lines, "lrr")


def _switching(outputs: Sequence[Output]) -> Table:
    """Show the time of each way to switch to a level."""
    rows = [row for row in only(outputs)["rows"] if row["row"] == "switch"]
    if not rows:
        raise NoRowsError("no rows of switches")
    found = {(row["level"], row["way"]): 1e3 * np.array(row["seconds"]) for row in rows}
    sizes = {row["level"]: row["file_bytes"] for row in rows if "file_bytes" in row}
    lines = []
    for level in sorted(sizes, reverse=True):
        cells = [percent(level), number(sizes[level] / 2**20, 0)]
        for way in _SWITCHING:
            ms = found.get((level, way))
            digits = _DIGITS.get(way, 1)
            cells.append("" if ms is None else between(median_interval(ms), digits, " ms"))
        lines.append(cells)
    return Table(["to level", "its file, MiB", *_SWITCHING], lines, "r" * (2 + len(_SWITCHING)))


TABLES: Mapping[str, Maker] = {"alone-memory": _memory, "alone-switching": _switching}
