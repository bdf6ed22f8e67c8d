"""Tables of ``bench_engine``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmaas_eval.benchmarks import benches, figures
from llmaas_eval.tables import Maker, Output, Table, between, bold, parse_interval

__all__ = ["TABLES"]

_PAIRS = {
    "200 M prefill": ("200m", "prefill"),
    "200 M generate": ("200m", "generate"),
    "1 B prefill": ("1b", "prefill"),
    "1 B generate": ("1b", "generate"),
}
_RATIOS = (0.25, 0.5, 0.75)
_GOAL = 0.05
"""Allowed share of the time beyond the part's share of the weight."""
_ALL = {"all four": "all"}
_PARTS = {
    "rows": "rows",
    "columns of `ffn_down`": "columns of ffn_down",
    "columns of `attn_output`": "columns of attn_output",
}
_PRODUCTS = {
    "Q4_0, 8 × 1 token": ("q4_0", "generate", None, _ALL | _PARTS),
    "Q4_0, 128 tokens": ("q4_0", "prefill", None, _PARTS),
    "Q4_K, 8 × 1 token": ("q4_k", "generate", None, _ALL | _PARTS),
    "Q4_K, 128 tokens": ("q4_k", "prefill", None, _PARTS),
    "tiles, Q4_0, 8 × 1 token": ("q4_0", "generate", "tiles", _ALL),
    "tiles, Q4_K, 8 × 1 token": ("q4_k", "generate", "tiles", _ALL),
}
"""Weights, batch, source of the claims, and parts, by name."""
_COLUMNS = {
    "Q4_0, 1 token": ("q4_0", "generate", None),
    "Q4_0, 128 tokens": ("q4_0", "prefill", None),
    "Q4_K, 1 token": ("q4_k", "generate", None),
    "Q4_K, 128 tokens": ("q4_k", "prefill", None),
}


def _overhead(outputs: Sequence[Output]) -> Table:
    """Show our time over vanilla's."""
    through = figures(outputs, "bench_engine::bench_pass_through", "pair", "what")
    states: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for bench in benches(outputs, "bench_engine::bench_hidden_states"):
        states.setdefault((bench.params["pair"], bench.params["what"]), []).append(bench.info)
    rows = {"pass-through": {pair: [info] for pair, info in through.items()}}
    rows["hidden states"] = states
    lines = [
        [name, *(_over_vanilla(found.get(pair, [])) for pair in _PAIRS.values())]
        for name, found in rows.items()
    ]
    return Table(["", *_PAIRS], lines, "lrrrr")


def _over_vanilla(infos: Sequence[Mapping[str, Any]]) -> str:
    """Return the range of ratios and of their intervals."""
    if not infos:
        return ""
    ratios = sorted(1 / info["speedup"] for info in infos)
    low = min(1 / info["speedup_high"] for info in infos)
    high = max(1 / info["speedup_low"] for info in infos)
    ends = dict.fromkeys(f"{ratio:.3f}" for ratio in (ratios[0], ratios[-1]))
    return f"{'–'.join(ends)} ({low:.3f}–{high:.3f})"


def _parts(outputs: Sequence[Output]) -> Table:
    """Show the time of products with a part of their weight; figures beyond the goal are bold."""
    found = figures(outputs, "bench_engine::bench_parts", "weights", "what", "source")
    lines = []
    for name, (*key, parts) in _PRODUCTS.items():
        info = found.get(tuple(key))
        if info is None:
            continue
        for i, (title, part) in enumerate(parts.items()):
            cells = [_share(info[f"{part} {ratio}"], ratio) for ratio in _RATIOS]
            lines.append(["" if i else name, title, *cells])
    return Table(["", "part", *map(str, _RATIOS)], lines, "llrrr")


def _share(text: str, ratio: float) -> str:
    found = parse_interval(text)
    shown = between(found, 3)
    return bold(shown) if found[0] > ratio + _GOAL else shown


def _columns(outputs: Sequence[Output]) -> Table:
    """Show the medians of columns in place."""
    found = figures(outputs, "bench_engine::bench_parts", "weights", "what", "source")
    ratios = " \\| ".join(map(str, _RATIOS))
    lines: list[list[str]] = []
    for matrix in ("attn_output", "ffn_down"):
        cells = []
        for key in _COLUMNS.values():
            info = found.get(key, {})
            names = [f"columns of {matrix} {ratio}" for ratio in _RATIOS]
            medians = [f"{parse_interval(info[name])[0]:.3f}" for name in names if name in info]
            cells.append(" \\| ".join(medians))
        lines.append([f"`{matrix}`" if lines else f"`{matrix}`, {ratios}", *cells])
    return Table(["columns of", *_COLUMNS], lines, "lllll")


TABLES: Mapping[str, Maker] = {
    "engine-overhead": _overhead,
    "engine-parts": _parts,
    "engine-columns": _columns,
}
