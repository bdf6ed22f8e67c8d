"""Tables of ``bench_interruptions`` and ``bench_deadlines``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmaas_eval.benchmarks import figures
from llmaas_eval.tables import Maker, Output, Table, between, parse_interval

__all__ = ["TABLES"]

_CELLS = {"parked": "parked cells", "tolerance": "`tolerance`", "lossless": "`lossless`"}


def _interruptions(outputs: Sequence[Output]) -> Table:
    """Show the time to leave and enter a context of 2,000 tokens."""
    found = figures(outputs, "bench_interruptions::bench_leave_and_enter", "kind")
    lines = [
        [
            label,
            f"{found[kind,]['first_ms']:.0f} ms",
            between(parse_interval(found[kind,]["leave_and_enter_ms"])),
            f"{found[kind,]['p99_ms']:.1f} ms",
        ]
        for kind, label in _CELLS.items()
    ]
    return Table(["cells", "first interruption", "median (quartiles), ms", "p99"], lines, "lrrr")


def _nothing_named(outputs: Sequence[Output]) -> Table:
    """Show the time of requests that name no latency, over that without the plugin."""
    info = figures(outputs, "bench_deadlines::bench_nothing_named")[()]
    ratio = tuple(info[name] for name in ("ratio", "ratio_low", "ratio_high"))
    return Table(["with `deadlines` over without"], [[between(ratio, 4)]], "r")


TABLES: Mapping[str, Maker] = {
    "deadlines-interruptions": _interruptions,
    "deadlines-nothing-named": _nothing_named,
}
