"""Tables of what ``llmaas demo --json`` and ``llmaas flash plan --json`` write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmaas_eval.tables import Maker, NoRowsError, Output, Table, bold, only
from llmaas_plugins.cli.day.figures import read_figures
from llmaas_plugins.cli.day.systems import TOGETHER
from llmaas_plugins.cli.day.table import HEADS, cells
from llmaas_plugins.demo.report import COLUMNS, three_digits
from llmaas_plugins.demo.run import OURS

__all__ = ["TABLES"]

_LEFT_OUT = ("enter_ms_p99", "peak_rss_mib")
_SWITCH = ("switch_ms_mean", "switch_ms_p50", "switch_ms_p99")
"""Figures that are bold where ours are best."""
_KIB = 1 << 10


def _demo(outputs: Sequence[Output]) -> Table:
    systems = only(outputs)["systems"]
    columns = [each for each in COLUMNS if each[0] not in _LEFT_OUT]
    heads = [f"{title} {unit}" if title == "decode" else title for _, title, unit in columns]
    keys = [key for key, _, _ in columns]
    rows = [[_name(name), *(_figure(systems, name, key) for key in keys)] for name in systems]
    return Table(["system", *heads], rows, "l".ljust(1 + len(heads), "r"))


def _name(system: str) -> str:
    return bold(system) if system == OURS else system


def _figure(systems: Mapping[str, Mapping[str, float]], name: str, key: str) -> str:
    text = three_digits(systems[name][key])
    best = min(found[key] for found in systems.values())
    is_best = name == OURS and key in _SWITCH and systems[name][key] == best
    return bold(text) if is_best else text


def _ratios(outputs: Sequence[Output]) -> Table:
    rows = [
        [name, _ratio(found["switch_s"]), _ratio(found["enter_s"])]
        for name, found in only(outputs)["speedup"].items()
    ]
    return Table(["ours against", "switching", "entering alone"], rows, "lrr")


def _ratio(found: Mapping[str, float]) -> str:
    return f"{found['median']:.1f}× ({found['low']:.1f}–{found['high']:.1f})"


def _day(outputs: Sequence[Output]) -> Table:
    rows = [cells(name, read_figures(found)) for name, found in only(outputs)["systems"].items()]
    heads = [" ".join(filter(None, head)) for head in HEADS]
    return Table(heads, [[_bold_name(row), *row[1:]] for row in rows], "l".ljust(len(heads), "r"))


def _bold_name(row: Sequence[str]) -> str:
    return bold(row[0]) if row[0] == TOGETHER else row[0]


def _disk(outputs: Sequence[Output]) -> Table:
    """Show GB/s by the size of reads and by how many are in flight."""
    rates: list[Any] = only(outputs)["machine"]["disk"]["rates"]
    if not rates:
        raise NoRowsError("the plan has no measured rates")
    by_size: dict[int, dict[int, float]] = {}
    for n_bytes, depth, bytes_per_s in rates:
        by_size.setdefault(n_bytes, {})[depth] = bytes_per_s
    depths = sorted({depth for _, depth, _ in rates})
    rows = [
        [f"{size // _KIB} KiB", *(f"{of[d] / 1e9:.2f}" if d in of else "" for d in depths)]
        for size, of in sorted(by_size.items())
    ]
    return Table(["", *map(str, depths)], rows, "r" * (1 + len(depths)))


TABLES: Mapping[str, Maker] = {
    "demo": _demo,
    "demo-day": _day,
    "demo-epyc": _demo,
    "demo-ratios": _ratios,
    "disk": _disk,
}
