"""The study's results as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmaas_eval.tables import Maker, NoRowsError, Output, Table, number, only, percent

__all__ = ["TABLES", "report"]

_MIB = 1 << 20
_EVEN = 0.5


def report(document: Output) -> str:
    """Return the table."""
    return _times([document]).as_markdown()


def _times(outputs: Sequence[Output]) -> Table:
    """Show the time of each workload with each division, beside the best and the even fixed one."""
    rows = only(outputs)["rows"]
    if not rows:
        raise NoRowsError("nothing was measured")
    lines = []
    for name in dict.fromkeys(row["workload"] for row in rows):
        mine = [row for row in rows if row["workload"] == name]
        fixed = {row["share"]: sum(row["turn_s"]) for row in mine if row["share"] is not None}
        best = min(fixed.values(), default=sum(mine[0]["turn_s"]))
        for row in mine:
            seconds = sum(row["turn_s"])
            memory = row["status"].get("memory", {})
            lines.append([
                name,
                "divided while running" if row["share"] is None else percent(row["share"]),
                number(seconds, 1),
                number(seconds / best, 2),
                number(fixed[_EVEN] / seconds, 2) if _EVEN in fixed else "",
                number(row["peak_bytes"] / _MIB, 0),
                number(row["budget"] / _MIB, 0),
                str(memory["moves"]) if memory else "",
            ])  # fmt: skip
    heads = ["workload", "memory for contexts", "seconds", "times the best fixed one",
             "faster than half and half", "peak, MiB", "budget, MiB", "moves"]  # fmt: skip
    return Table(heads, lines, "llrrrrrr")


TABLES: Mapping[str, Maker] = {"memory-division": _times}
"""Function that makes each table."""
