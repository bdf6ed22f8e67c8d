"""Results of the study as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from llmaas_eval.markdown import table
from llmaas_eval.sparse.reads import ONE_BILLION, Flash
from llmaas_eval.sparse.study import Row
from llmaas_eval.tables import Maker, Output, Table, as_markdown, only, percent

__all__ = ["TABLES", "report"]

_SPARSITY = 0.5
"""Sparsity of the channels in ``eval/results``."""
_LFU, _STATIC, _BEST = "LFU, context", "static", "Belady"
_SIZES = (0.2, 0.3, 0.4, 0.5)
_WAYS = {
    "by threshold, oracle": ("threshold", False),
    "Top-K, oracle": ("top-k", False),
    "every token masked, threshold": ("threshold", True),
    "every token masked, Top-K": ("top-k", True),
}
"""Selection, and whether the prompt is masked, too."""
_ORDERS = {
    "busiest in calibration, on demand": (_STATIC, 1, False, "busiest"),
    "LFU, busiest first in the file": (_LFU, 1, False, "busiest"),
    "LFU, in the model's order": (_LFU, 1, False, "index"),
    "LFU, two layers side by side": (_LFU, 2, False, "busiest"),
    "LFU, four layers side by side": (_LFU, 4, False, "busiest"),
    "LFU, four side by side, read ahead by prediction (of it on demand)": (
        _LFU,
        4,
        True,
        "busiest",
    ),
    "busiest, read ahead by prediction (of it on demand)": (_STATIC, 1, True, "busiest"),
}
"""Policy, layers in a group, whether channels are read ahead, and the order of the file."""


def report(found: Mapping[str, Sequence[Row]]) -> str:
    """Return all tables with their headings."""
    parts = [f"## {heading}\n\n{show(found[name])}" for name, (heading, show) in _PARTS.items()]
    return "\n\n".join([*parts, as_markdown(TABLES, [found])])


# -- tables of eval/results ----------------------------------------------------------------------


def _perplexities(outputs: Sequence[Output]) -> Table:
    """Show the perplexity by the share of channels that is left out."""
    rows = only(outputs)["perplexity"]
    sparsities = sorted({row["sparsity"] for row in rows})
    found = {
        (row["selection"], row["dense"] == 0, row["sparsity"]): row["perplexity"] for row in rows
    }
    lines = [
        [label, *(f"{found[(*way, sparsity)]:.2f}" for sparsity in sparsities)]
        for label, way in _WAYS.items()
    ]
    heads = [percent(sparsity) if sparsity else "0" for sparsity in sparsities]
    return Table(["left out", *heads], lines, "l".ljust(1 + len(heads), "r"))


def _hit_rates(outputs: Sequence[Output]) -> Table:
    """Show hits in percent by the share of channels in memory, for the first task."""
    found: dict[str, dict[tuple[str, float], float]] = {}
    for row in _of_first_task(only(outputs)["hits"]):
        found.setdefault(row["family"], {})[row["policy"], row["size"]] = row["rate"]
    lines: list[list[str]] = []
    for family, rates in found.items():
        pairs = [(rates[_LFU, size], rates[_STATIC, size]) for size in _SIZES]
        name = f"`{family}`" if lines else f"`{family}`: LFU of the context, busiest in calibration"
        cells = [f"{100 * lfu:.0f}, {100 * static:.0f}" for lfu, static in pairs]
        lines.append([name, *cells, f"{100 * rates[_BEST, _SIZES[-1]]:.0f}"])
    heads = ["", *map(percent, _SIZES), f"{_BEST} at {percent(_SIZES[-1])}"]
    return Table(heads, lines, "lrrrrr")


def _read_times(outputs: Sequence[Output]) -> Table:
    """Show milliseconds a token by the share of channels in memory, for the first task."""
    sums: dict[tuple[Any, ...], list[float]] = {}
    for row in _of_first_task(only(outputs)["reads"]):
        key = tuple(row[name] for name in ("policy", "layers", "ahead", "order", "size"))
        total = sums.setdefault(key, [0.0, 0.0])
        total[0] += (row["ahead_us"] + row["on_demand_us"]) / 1000
        total[1] += row["on_demand_us"] / 1000
    sizes = sorted({key[-1] for key in sums})
    lines = [["all that is missing, in a row", *(f"{_streamed(size):.0f}" for size in sizes)]]
    for label, way in _ORDERS.items():
        if (*way, sizes[0]) in sums:
            cells = [sums[(*way, size)] for size in sizes]
            is_ahead = way[2]
            lines.append([label, *(_milliseconds(*cell, is_ahead=is_ahead) for cell in cells)])
    return Table(["", *map(percent, sizes)], lines, "l".ljust(1 + len(sizes), "r"))


def _of_first_task(rows: Sequence[Row]) -> list[Row]:
    some = [row for row in rows if row["sparsity"] == _SPARSITY]
    return [row for row in some if row["task"] == some[0]["task"]]


def _streamed(share: float) -> float:
    """Return the milliseconds to read all weights but this share of them, one after the other."""
    dense = sum(of.n_layers * of.n_channels * of.record_bytes for of in ONE_BILLION.values())
    return (1 - share) * dense / Flash().bytes_per_us / 1000


def _milliseconds(total: float, on_demand: float, *, is_ahead: bool, digits: int = 0) -> str:
    of_it = f" ({on_demand:.{digits}f})" if is_ahead else ""
    return f"{total:.{digits}f}{of_it}"


TABLES: Mapping[str, Maker] = {
    "sparse-perplexity": _perplexities,
    "sparse-hits": _hit_rates,
    "sparse-reads": _read_times,
}


# -- all rows ------------------------------------------------------------------------------------


def _perplexity(rows: Sequence[Row]) -> str:
    return _pivot(rows, ("selection", "dense"), "sparsity", lambda row: f"{row['perplexity']:.2f}")


def _likeness(rows: Sequence[Row]) -> str:
    heads = ["sparsity", "family", "distance", "cosine by layer", "precision by layer"]
    names = ("sparsity", "family", "distance")
    return table(
        heads,
        [
            [*(str(row[name]) for name in names), _list(row["cosine"]), _list(row["precision"])]
            for row in rows
        ],
    )


def _selection(rows: Sequence[Row]) -> str:
    heads = ["sparsity", "task", "family", "hottest", "seen", "by context", "by task"]
    return table(
        heads,
        [
            [*_about(row), f"{row['hottest']:.0%}"]
            + [f"{row[name]:.3f}" for name in ("seen", "by_context", "by_task")]
            for row in rows
        ],
    )


def _hits(rows: Sequence[Row]) -> str:
    about = ("sparsity", "task", "family", "policy")
    return _pivot(rows, about, "size", lambda row: f"{row['rate']:.3f}")


def _spread(rows: Sequence[Row]) -> str:
    heads = ["sparsity", "task", "family", "deciles", "entropy", "top 30 % by layer"]
    heads += ["overlap", "by chance", "layers alike", "sigma by layer"]
    lines = []
    for row in rows:
        line = [*_about(row), _list(row["deciles"]), f"{row['entropy']:.4f}"]
        line += [_list(row["coverage"]), f"{row['overlap']:.3f}", f"{row['by_chance']:.3f}"]
        lines.append([*line, _list(row["alike"]), _list(row["sigma"])])
    return table(heads, lines)


def _reads(rows: Sequence[Row]) -> str:
    """Return tables of milliseconds a token over all families, and of the part on demand."""
    names = ("sparsity", "task", "policy", "layers", "ahead", "order", "size")
    sums: dict[tuple[object, ...], Row] = {}
    for row in rows:
        key = tuple(row[name] for name in names)
        total = sums.setdefault(
            key, dict(zip(names, key, strict=True)) | {"ahead_us": 0.0, "on_demand_us": 0.0}
        )
        for name in ("ahead_us", "on_demand_us"):
            total[name] += row[name]
    shares = sorted({row["size"] for row in rows})
    compared = ", ".join(f"{_streamed(share):.0f} at {share}" for share in shares)
    cells = _pivot(list(sums.values()), names[:-1], "size", _cost)
    by_family = _pivot(
        [row for row in rows if row["layers"] == 1 and not row["ahead"]],
        ("sparsity", "task", "family", "policy", "order"),
        "size",
        _cost,
    )
    return (
        f"Streaming all weights outside memory takes {compared} (ms).\n\n{cells}\n\n"
        f"Layer by layer, on demand:\n\n{by_family}"
    )


def _cost(row: Row) -> str:
    total, on_demand = row["ahead_us"] + row["on_demand_us"], row["on_demand_us"]
    return _milliseconds(total / 1000, on_demand / 1000, is_ahead=row["ahead"], digits=1)


def _about(row: Row) -> list[str]:
    return [str(row[name]) for name in ("sparsity", "task", "family")]


def _pivot(
    rows: Sequence[Row], about: Sequence[str], across: str, show: Callable[[Row], str]
) -> str:
    """Return a table with a line for each value of ``about`` and a column for each ``across``."""
    columns = sorted({row[across] for row in rows})
    lines: dict[tuple[str, ...], dict[float, str]] = {}
    for row in rows:
        key = tuple(str(row[name]) for name in about)
        lines.setdefault(key, {})[row[across]] = show(row)
    return table(
        [*about, *(f"{across} {column:g}" for column in columns)],
        [[*key, *(cells[column] for column in columns)] for key, cells in lines.items()],
    )


def _list(values: Iterable[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


_PARTS: Mapping[str, tuple[str, Callable[[Sequence[Row]], str]]] = {
    "perplexity": ("Perplexity by sparsity", _perplexity),
    "engine": ("Perplexity of the engine", _perplexity),
    "likeness": ("Similarity of layers", _likeness),
    "selection": ("Probability that hot channels are selected", _selection),
    "spread": ("How unevenly channels are used", _spread),
    "hits": ("Hit rates by the share of the channels that is cached", _hits),
    "reads": ("Reads of a token of a model of 1.2 billion weights, in ms (on demand)", _reads),
}
