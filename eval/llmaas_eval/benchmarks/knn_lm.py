"""Tables of ``bench_knn_scan``, ``_decode``, ``_sizes`` and ``_select``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from llmaas_eval.benchmarks import Bench, benches, figures, quartiles
from llmaas_eval.tables import Maker, Output, Table, bold, number, parse_interval, percent

__all__ = ["TABLES"]

_RIVALS = {"numpy": "numpy fp32", "faiss-flat": "faiss Flat", "faiss-sq8": "faiss SQ8, refined"}
_FORMS = {"whole": "all dimensions", "pca256": "256 directions"}
_DESIGNS = ("offline", "online", "merging")
_SELECTED = 100_000
"""Pairs of a selection; more are a full datastore."""


def _searches(outputs: Sequence[Output]) -> Table:
    """Show our search and its rivals by kind of keys and dimensions."""
    lines = []
    runs = sorted(benches(outputs, "bench_knn_scan::bench_search"), key=_place)
    for _, some in groupby(runs, key=lambda bench: _place(bench)[:2]):
        for i, bench in enumerate(some):
            info, params = bench.info, bench.params
            label = "" if i else f"{params['keys']}, {_FORMS[params['form']]}"
            rival = f"{_RIVALS[params['rival']]} {number(parse_interval(info['vanilla_ms'])[0])}"
            ours = f"{parse_interval(info['ours_ms'])[0]:.1f}"
            lines.append([label, ours, rival, _time_over(info), _recalls(info)])
    heads = ["keys", "ours, ms", "rival, ms", "ours / rival", "recall (rival's)"]
    return Table(heads, lines, "lrrrr")


def _place(bench: Bench) -> tuple[int, int, int]:
    orders = (["normal", "clustered"], list(_FORMS), list(_RIVALS))
    names = ("keys", "form", "rival")
    keys, form, rival = (
        order.index(bench.params[name]) for order, name in zip(orders, names, strict=True)
    )
    return keys, form, rival


def _time_over(info: Mapping[str, Any]) -> str:
    digits = 2 if info["speedup"] <= 10 else 3
    ratio, low, high = (
        f"{1 / info[name]:.{digits}f}" for name in ("speedup", "speedup_high", "speedup_low")
    )
    text = f"{ratio} ({low} to {high})"
    return bold(text) if info["speedup"] > 1 else text


def _recalls(info: Mapping[str, Any]) -> str:
    rival = _recall(info["rival_recall"])
    return _recall(info["recall"]) + ("" if rival == "1.000" else f" ({rival})")


def _recall(value: float) -> str:
    return f"{value:.4f}" if 0.9995 <= value < 1 else f"{value:.3f}"


def _decoding(outputs: Sequence[Output]) -> Table:
    """Show tokens with a search for each, by the size of the datastore."""
    runs = benches(outputs, "bench_knn_decode::bench_decode")
    has_machines = len({bench.machine for bench in runs}) > 1
    lines = []
    for bench in runs:
        n_pairs, info = bench.params["store"], bench.info
        parts = [bench.machine] if has_machines else []
        parts += ["a full datastore"] if n_pairs > _SELECTED else []
        parts += ["a datastore that is not trusted"] if bench.params["look_back"] else []
        speed = f"{info['speed']:.2f} ({info['speed_low']:.2f} to {info['speed_high']:.2f})"
        is_selected = n_pairs == _SELECTED and not bench.params["look_back"]
        cells = [f"{parse_interval(info[f'{side}_ms'])[0]:.1f}" for side in ("ours", "vanilla")]
        cells += [bold(speed) if is_selected else speed, f"{info['more_mib']:.0f} MiB"]
        lines.append([", ".join(parts), _pairs(n_pairs), *cells])
    heads = ["", "pairs", "ms a token", "vanilla", "vanilla's speed ×", "more at the peak"]
    return Table(heads, lines, "lrrrrr")


def _sizes(outputs: Sequence[Output]) -> Table:
    """Show a token's search and mixing by the size of the datastore."""
    runs = benches(outputs, "bench_knn_sizes::bench_token")
    lines = [
        [
            _pairs(info["n_pairs"]),
            quartiles(parse_interval(info["search_ms"])),
            quartiles(parse_interval(info["mix_ms"])),
            percent(info["share"], 1),
            f"{number(info['memory_mb'])} MB",
            f"{number(info['keys_gb'])} GB",
        ]
        for info in sorted((bench.info for bench in runs), key=lambda info: info["n_pairs"])
    ]
    heads = ["pairs", "search, ms", "mixing, ms", "of a token, at most", "memory", "keys on disk"]
    return Table(heads, lines, "rrrrrr")


def _designs(outputs: Sequence[Output]) -> Table:
    """Show the time and memory of each design that selects pairs."""
    found = figures(outputs, "bench_knn_select::bench_designs", "n_full", "design")
    lines = []
    for n in sorted({n for n, _ in found}):
        rows = [found[n, design] for design in _DESIGNS]
        times = [f"{number(row['seconds'])} s" for row in rows]
        lines.append([f"{n:,}", *times, *(f"{row['more_mib']:.0f} MiB" for row in rows)])
    heads = ["pairs", *_DESIGNS, *(f"{design}: more memory" for design in _DESIGNS)]
    return Table(heads, lines, "rrrrrrr")


def _pairs(n: int) -> str:
    return f"{n:.0e}".replace("e+0", "e")


TABLES: Mapping[str, Maker] = {
    "knn-scan": _searches,
    "knn-decode": _decoding,
    "knn-sizes": _sizes,
    "knn-designs": _designs,
}
