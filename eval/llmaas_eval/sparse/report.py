"""Results of the study as Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from llmaas_eval.markdown import table
from llmaas_eval.sparse.reads import ONE_BILLION, Flash
from llmaas_eval.sparse.study import Row

__all__ = ["report"]


def report(found: Mapping[str, Sequence[Row]]) -> str:
    """Return all tables with their headings."""
    return "\n\n".join(
        f"## {heading}\n\n{show(found[name])}" for name, (heading, show) in _TABLES.items()
    )


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
    dense = sum(
        some.n_layers * some.n_channels * some.record_bytes for some in ONE_BILLION.values()
    )
    streamed = dense / Flash().bytes_per_us / 1000
    shares = sorted({row["size"] for row in rows})
    compared = ", ".join(f"{streamed * (1 - share):.0f} at {share}" for share in shares)
    cells = _pivot(list(sums.values()), names[:-1], "size", _milliseconds)
    by_family = _pivot(
        [row for row in rows if row["layers"] == 1 and not row["ahead"]],
        ("sparsity", "task", "family", "policy", "order"),
        "size",
        _milliseconds,
    )
    return (
        f"Streaming all weights outside memory takes {compared} (ms).\n\n{cells}\n\n"
        f"Layer by layer, on demand:\n\n{by_family}"
    )


def _milliseconds(row: Row) -> str:
    total = (row["ahead_us"] + row["on_demand_us"]) / 1000
    waited = row["on_demand_us"] / 1000
    return f"{total:.1f} ({waited:.1f})" if row["ahead"] else f"{total:.1f}"


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


_TABLES: Mapping[str, tuple[str, Callable[[Sequence[Row]], str]]] = {
    "perplexity": ("Perplexity by sparsity", _perplexity),
    "engine": ("Perplexity of the engine", _perplexity),
    "likeness": ("Similarity of layers", _likeness),
    "selection": ("Probability that hot channels are selected", _selection),
    "spread": ("How unevenly channels are used", _spread),
    "hits": ("Hit rates by the share of the channels that is cached", _hits),
    "reads": ("Reads of a token of a model of 1.2 billion weights, in ms (on demand)", _reads),
}
