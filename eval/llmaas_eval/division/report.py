"""The study's results as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.stats import median_interval
from llmaas_eval.tables import Maker, NoRowsError, Output, Table, between, number, only, percent

__all__ = ["TABLES", "report"]

Row = Mapping[str, Any]

_MIB = 1 << 20
_EVEN = 0.5


def report(document: Output) -> str:
    """Return the table."""
    return _times([document]).as_markdown()


def _times(outputs: Sequence[Output]) -> Table:
    """Show the time of each workload with each division, beside the best and the even fixed one.

    Times are medians of all rounds, ratios are paired: of runs of the same round.
    """
    rows = only(outputs)["rows"]
    if not rows:
        raise NoRowsError("nothing was measured")
    lines = []
    for name in dict.fromkeys(row["workload"] for row in rows):
        runs = _by_share([row for row in rows if row["workload"] == name])
        seconds = {share: _seconds(mine) for share, mine in runs.items()}
        fixed = [times for share, times in seconds.items() if share is not None]
        best = min(fixed or seconds.values(), key=np.median)
        even = seconds.get(_EVEN)
        for share, mine in runs.items():
            moves = [row["status"]["memory"]["moves"] for row in mine if "memory" in row["status"]]
            lines.append([
                name,
                "divided while running" if share is None else percent(share),
                number(float(np.median(seconds[share])), 1),
                _ratio(seconds[share] / best),
                "" if even is None else _ratio(even / seconds[share]),
                number(max(row["peak_bytes"] for row in mine) / _MIB, 0),
                number(mine[0]["budget"] / _MIB, 0),
                str(max(moves)) if moves else "",
            ])  # fmt: skip
    heads = ["workload", "memory for contexts", "seconds", "times the best fixed one",
             "faster than half and half", "peak, MiB", "budget, MiB", "moves"]  # fmt: skip
    return Table(heads, lines, "llrrrrrr")


def _by_share(rows: Iterable[Row]) -> dict[float | None, list[Row]]:
    """Return the rounds of each division, ours first."""
    found: dict[float | None, list[Row]] = {}
    for row in rows:
        found.setdefault(row["share"], []).append(row)
    return dict(sorted(found.items(), key=lambda item: (item[0] is not None, item[0] or 0)))


def _seconds(runs: Sequence[Row]) -> NDArray[np.float64]:
    """Return the time of all requests of each run; shape ``(n_rounds,)``."""
    return np.array([sum(run["turn_s"]) for run in runs])


def _ratio(values: NDArray[np.float64]) -> str:
    """Return the median of all rounds' ratios; a single one has no interval."""
    return number(values[0], 2) if len(values) == 1 else between(median_interval(values), 2)


TABLES: Mapping[str, Maker] = {"memory-division": _times}
"""Function that makes each table."""
