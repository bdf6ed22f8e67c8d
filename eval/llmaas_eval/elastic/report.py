"""The study's results as Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from llmaas_eval.elastic.readings import Reading, perplexity, perplexity_ratio
from llmaas_eval.elastic.rows import FULL, OURS, Found, Row
from llmaas_eval.markdown import table
from llmaas_eval.stats import Interval, mean_interval

__all__ = ["report"]

_Value = Callable[[Reading, Reading], str]
"""Function that formats a reading, given also the full model's reading."""


def report(found: Found) -> str:
    """Return the tables of all measured parts under their headings."""
    parts = [
        f"## {heading}\n\n{show(found[part])}" for part, heading, show in _PARTS if found[part]
    ]
    return "\n\n".join(parts)


def _quality(rows: Sequence[Row]) -> str:
    full = _full(rows)
    return "\n\n".join(
        [
            f"Perplexity over the full model's, which is {perplexity(full):.2f}:",
            _by_level(rows, _over_full),
            "KL (nats):",
            _by_level(rows, lambda reading, _: f"{reading.kl.mean():.3f}"),
            "Same most likely token:",
            _by_level(rows, lambda reading, _: f"{reading.same.mean():.1%}"),
            "Share of the blocks' bytes in use:",
            _shares(rows),
        ]
    )


def _compared(rows: Sequence[Row]) -> str:
    """Compare perplexity and KL of other methods with ours without biases, and ours in pairs."""
    methods = list(dict.fromkeys(row.method for row in rows if row.method != FULL))
    ours = [name for name in methods if name.startswith(OURS)]
    others = [name for name in methods if name not in ours]
    pairs = [(other, own) for own in ours if own in OURS for other in others]
    pairs += [(a, b) for i, a in enumerate(ours) for b in ours[i + 1 :]]
    if not pairs:
        return ""
    return "\n\n".join(
        [
            "Perplexity of the first over that of the second, with 95 % intervals:",
            _pairs(rows, pairs, perplexity_ratio),
            "KL of the first less that of the second:",
            _pairs(rows, pairs, lambda a, b: mean_interval(a.kl - b.kl)),
        ]
    )


def _layers(rows: Sequence[Row]) -> str:
    full = _full(rows)
    lines = []
    for row in rows:
        if row.method != FULL:
            more, kl = mean_interval(row.reading.nats - full.nats), row.reading.kl.mean()
            lines.append([row.method, _interval(more), f"{kl:.3f}"])
    return table(["layer removed", "loss increase (nats)", "KL"], lines)


def _ratios(rows: Sequence[Row]) -> str:
    return _by_level(rows, _over_full)


def _continued(rows: Sequence[Row]) -> str:
    """Show contexts that change their level, also relative to one level throughout."""
    readings = {(row.method, row.level): row.reading for row in rows if row.method != FULL}
    origins, levels = (list(dict.fromkeys(keys)) for keys in zip(*readings, strict=True))
    (_, base), *_ = readings.items()
    cells = {key: f"{perplexity_ratio(found, base).value:.4f}" for key, found in readings.items()}
    own = {level: readings[origin, level] for origin, level in zip(origins, levels, strict=True)}
    lines = [
        [
            f"{origin} to {level:.0%}",
            _interval(perplexity_ratio(readings[origin, level], own[before])),
            _interval(perplexity_ratio(readings[origin, level], own[level])),
        ]
        for origin, before in zip(origins, levels, strict=True)
        for level in levels
        if level != before
    ]
    return "\n\n".join(
        [
            "Perplexity over that of the whole model throughout:",
            _table(cells),
            "Perplexity over that of one level throughout, with 95 % intervals:",
            table(["", "the first level", "the second"], lines),
        ]
    )


def _over_full(reading: Reading, full: Reading) -> str:
    return f"{perplexity_ratio(reading, full).value:.3f}"


def _interval(found: Interval) -> str:
    return f"{found.value:.4f} ({found.low:.4f} to {found.high:.4f})"


def _by_level(rows: Sequence[Row], show: _Value) -> str:
    full = _full(rows)
    return _table(
        {(row.method, row.level): show(row.reading, full) for row in rows if row.method != FULL}
    )


def _shares(rows: Sequence[Row]) -> str:
    return _table(
        {(row.method, row.level): f"{row.share:.3f}" for row in rows if row.method != FULL}
    )


def _pairs(
    rows: Sequence[Row],
    pairs: Sequence[tuple[str, str]],
    compare: Callable[[Reading, Reading], Interval],
) -> str:
    readings = {(row.method, row.level): row.reading for row in rows}
    cells = {}
    for a, b in pairs:
        for level in sorted({level for _, level in readings}):
            if (a, level) in readings and (b, level) in readings:
                found = compare(readings[a, level], readings[b, level])
                cells[f"{a} : {b}", level] = _interval(found)
    return _table(cells)


def _table(cells: Mapping[tuple[str, float], str]) -> str:
    """Return a table with a row for each name and a column for each level, highest level first."""
    names = list(dict.fromkeys(name for name, _ in cells))
    levels = sorted({level for _, level in cells}, reverse=True)
    lines = [[name, *(cells.get((name, level), "") for level in levels)] for name in names]
    return table(["", *(f"{level:.0%}" for level in levels)], lines)


def _full(rows: Sequence[Row]) -> Reading:
    return next(row.reading for row in rows if row.method == FULL)


_PARTS = (
    ("levels", "Quality by level", _quality),
    ("levels", "Methods compared", _compared),
    ("layers", "Layers removed", _layers),
    ("calibration", "Perplexity over the full model's by tokens that importance is from", _ratios),
    ("types", "Perplexity over F16's by type of the weights", _ratios),
    ("continued", "Contexts that change their level, from the disk", _continued),
)
