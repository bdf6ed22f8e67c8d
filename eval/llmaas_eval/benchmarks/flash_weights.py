"""Tables of ``bench_flash``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llmaas_eval.benchmarks import benches, figures, grouped, quartiles
from llmaas_eval.tables import (
    Maker,
    NoRowsError,
    Output,
    Table,
    between,
    bold,
    parse_interval,
    percent,
)

__all__ = ["TABLES"]

_Figures = Mapping[str, Any]

_MODEL, _SPARSE_MODEL = "1b", "local"
_IN_MEMORY, _LIMITED = 1.8, 0.6
"""Memory in shares of the model."""
_MODES = {
    "vanilla": "vanilla",
    "exact": "exact",
    "sparse": "sparse, `streamed`",
    "top_k": "… Top-K",
    "busiest": "… `busiest`",
    "shared": "… `shared` (LFU)",
    "layer": "… `layer` (the paper's LFU)",
}
_LEVERS = {
    "vanilla": "vanilla",
    "streamed": "`streamed`, the default",
    "on demand": "on demand",
    "on demand top_k": "… Top-K in place of thresholds",
    "on demand shared": "… `shared` LFU",
    "on demand layer": "… `layer`: the paper's LFU",
    "on demand preload": "… **preloading**",
    "on demand depth 16": "… 16 reads at a time",
    "on demand depth 4": "… 4",
    "on demand depth 1": "… 1",
    "on demand gap 0": "… no gaps read along",
    "on demand gap 64K": "… gaps of 64 KiB read along",
    "2 layers": "groups of 2 layers",
    "2 layers preload": "… preloading",
    "4 layers": "groups of 4 layers",
    "4 layers preload": "… preloading",
    "4 layers all of the paper's": "… preloading, Top-K, `layer`: all of the paper's",
}
_ALWAYS_DENSE = ("vanilla", "exact")


def _budgets(outputs: Sequence[Output]) -> Table:
    """Show tokens of a model larger than memory by the memory, then one that fits."""
    found = figures(outputs, "bench_flash::bench_exact", "model", "share")
    lines = []
    for (model, share), info in sorted(found.items()):
        if model == _MODEL:
            speedup = info["speedup"], info["speedup_low"], info["speedup_high"]
            cells = [
                f"{info['budget_mib']} MiB",
                percent(share),
                *_both_ms(info),
                bold(between(speedup, 1, "×")),
                f"{info['over_floor']:.2f}",
                f"{info['read_mb']:.0f} MB",
                f"{parse_interval(info['disk_gb_s'])[0]:.2f} GB/s",
                f"{info['peak_mib']} MiB",
            ]
            lines.append(cells)
    if not lines:
        raise NoRowsError("found no run of bench_exact on the dense model")
    lines += [_fitting(info) for info in _optional(outputs, "bench_flash::bench_fits")]
    heads = ["budget", "of the model", "ours, ms", "vanilla, ms", "ours is faster"]
    heads += ["over the floor", "read a token", "disk", "peak (RSS)"]
    return Table(heads, lines, "r" * len(heads))


def _fitting(info: _Figures) -> list[str]:
    speedup = between(parse_interval(info["speedup"]), 2, "×")
    budget, peak = f"{info['budget_mib']} MiB", f"{info['peak_mib']} MiB"
    return [budget, "all fits", *_both_ms(info), speedup, "", "0", "", peak]


def _both_ms(info: _Figures) -> list[str]:
    return [
        quartiles(parse_interval(info["ours_ms"])),
        grouped(parse_interval(info["vanilla_ms"])[0]),
    ]


def _optional(outputs: Sequence[Output], function: str) -> list[_Figures]:
    try:
        return [bench.info for bench in benches(outputs, function)]
    except NoRowsError:
        return []


def _modes(outputs: Sequence[Output]) -> Table:
    """Show tokens of the sparse mode with all memory and with little."""
    found = figures(outputs, "bench_flash::bench_sparse", "sparse_model", "share")
    whole, limited = (found.get((_SPARSE_MODEL, share)) for share in (_IN_MEMORY, _LIMITED))
    if whole is None or limited is None:
        raise NoRowsError("found no run of bench_sparse with all memory and one with little")
    lines = []
    for name, label in _MODES.items():
        info = limited[name]
        hits = "" if name in _ALWAYS_DENSE else percent(info["hits"])
        cells = [_ms(whole, name), _speed(whole, name, _MODES, 2)]
        cells += [_ms(limited, name), _speed(limited, name, _MODES, 1), hits, _read(info)]
        lines.append([label, *cells])
    share = f"{percent(_LIMITED)} of the model ({limited['budget_mib']} MiB), ms"
    heads = ["", "all in memory, ms", "over vanilla", share, "over vanilla"]
    return Table([*heads, "channels in memory", "read a token"], lines, "lrrrrrr")


def _levers(outputs: Sequence[Output]) -> Table:
    """Show each option of the sparse mode alone."""
    (bench,) = benches(outputs, "bench_flash::bench_levers")
    lines = []
    for name, label in _LEVERS.items():
        info = bench.info[name]
        wasted = f"{info['wasted_mb']:.0f} MB" if info.get("wasted_mb", 0) >= 0.5 else ""
        speed = _speed(bench.info, name, _LEVERS, 1)
        lines.append([label, _ms(bench.info, name), speed, _read(info), wasted])
    return Table(["", "ms", "over vanilla", "read a token", "of it in vain"], lines, "lrrrr")


def _ms(infos: _Figures, name: str) -> str:
    return quartiles(parse_interval(infos[name]["ms"]))


def _speed(infos: _Figures, name: str, names: Iterable[str], digits: int) -> str:
    """Return the speed over vanilla's, in bold if it is the highest."""
    if name == "vanilla":
        return "1"
    best = max(parse_interval(infos[each]["speedup"])[0] for each in names)
    found = parse_interval(infos[name]["speedup"])
    return bold(between(found, digits)) if found[0] == best else between(found, digits)


def _read(info: _Figures) -> str:
    return f"{info['read_mb']:.0f} MB" if "read_mb" in info else ""


TABLES: Mapping[str, Maker] = {
    "flash-budgets": _budgets,
    "sparse-speed": _modes,
    "sparse-levers": _levers,
}
