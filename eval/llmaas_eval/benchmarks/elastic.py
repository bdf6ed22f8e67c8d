"""Tables of ``bench_elastic``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmaas_eval.benchmarks import figures, grouped
from llmaas_eval.tables import Maker, Output, Table, between, parse_interval, percent
from llmaas_plugins.elastic.uniform import LEVELS

__all__ = ["TABLES"]

_BATCHES = {
    "token, 1 thread": ("token", 1),
    "token, 2 threads": ("token", 2),
    "128 tokens, 2 threads": (128, 2),
    "512 tokens, 2 threads": (512, 2),
}
_WITH_INTERVAL = (512, 2)
_ADAPTED: Mapping[str | int, str] = {"token": "token", 256: "256 tokens"}


def _levels(outputs: Sequence[Output]) -> Table:
    """Show the milliseconds of a batch and its block time over the full level's."""
    found = figures(outputs, "bench_elastic::bench_levels", "what", "n_threads")
    lines = []
    for level in LEVELS:
        cells = []
        for batch in _BATCHES.values():
            info = found.get(batch, {}).get(f"{level:.0%}")
            unit = " ms" if level == 1 else ""
            if info is None:
                cells += ["", ""]
            else:
                cells += [_ms(info) + unit, _block_time(info, level, batch)]
        lines.append([percent(level), *cells])
    heads = ["level", *(head for batch in _BATCHES for head in (batch, "block time"))]
    return Table(heads, lines, "l".ljust(len(heads), "r"))


def _ms(info: Mapping[str, Any]) -> str:
    return grouped(parse_interval(info["ms"])[0])


def _block_time(info: Mapping[str, Any], level: float, batch: tuple[object, int]) -> str:
    if level == 1:
        return "1"
    share, low, high = parse_interval(info["block time"])
    interval = f" ({low:.2f}–{high:.2f})" if batch == _WITH_INTERVAL else ""
    return f"{share:.3f}{interval}"


def _adapters(outputs: Sequence[Output]) -> Table:
    """Show the milliseconds of a level, and how much longer it takes with adapters."""
    found = figures(outputs, "bench_elastic::bench_adapters", "what")
    lines = []
    for level in LEVELS:
        name = f"{level:.0%}"
        if not all(name in found[what,] for what in _ADAPTED):
            continue
        cells = []
        for what in _ADAPTED:
            info = found[what,][name]
            cells.append(_ms(info) + " ms")
            cells += [between(parse_interval(info[way]), 3) for way in ("adapters", "llama.cpp's")]
        lines.append([percent(level), *cells])
    heads = ["level"]
    for head in _ADAPTED.values():
        heads += [head, "with adapters", "llama.cpp's"]
    return Table(heads, lines, "l".ljust(len(heads), "r"))


def _cut(outputs: Sequence[Output]) -> Table:
    """Show the milliseconds of a level with whole keys and values, and with them cut."""
    found = figures(outputs, "bench_keys_values::bench_cut", "what")
    batches = {"token": "token", 512: "512 tokens"}
    lines = []
    for level, info in found["token",].items():
        cells = [level.replace("%", " %"), *(percent(share) for share in info["shares"])]
        for what in batches:
            own = found[what,][level]
            cells += [grouped(parse_interval(own[side])[0]) + " ms" for side in ("whole", "cut")]
            cells.append(between(parse_interval(own["ratio"]), 3))
        lines.append(cells)
    heads = ["level", "bytes, whole", "bytes, cut"]
    for head in batches.values():
        heads += [f"{head}, whole", "cut", "cut over whole"]
    return Table(heads, lines, "l".ljust(len(heads), "r"))


TABLES: Mapping[str, Maker] = {
    "elastic-time": _levels,
    "elastic-adapters": _adapters,
    "elastic-cut-time": _cut,
}
