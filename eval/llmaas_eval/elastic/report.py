"""The study's results as tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

from llmaas_eval.elastic.readings import Reading, perplexity, perplexity_ratio
from llmaas_eval.elastic.rows import FULL, INTERPOLATED, OURS, Row, from_json
from llmaas_eval.markdown import table
from llmaas_eval.stats import Interval, mean_interval
from llmaas_eval.tables import (
    Maker,
    NoRowsError,
    Output,
    Table,
    as_markdown,
    between,
    bold,
    number,
    only,
    percent,
)

__all__ = ["TABLES", "report"]

_SEARCHED = "searched"
_LABELS = {
    _SEARCHED: "`searched`",
    "uniform": "`uniform` (the paper's widths, our order)",
    "first order": "`uniform`, the paper's order (first order)",
    "fluctuation": "fluctuation (without gradients)",
    "LLM-Pruner": "LLM-Pruner's importance and grouping",
    "LLM-Pruner, own layers": "the same, with its own layers whole",
    "magnitude": "magnitude",
    "random": "random order, mean of five",
    f"ShortGPT{INTERPOLATED}": "ShortGPT, interpolated to as many bytes",
    "ShortGPT": "ShortGPT, next larger number of layers",
    f"LaCo{INTERPOLATED}": "LaCo's merging, interpolated",
}
"""Methods in ``eval/results``."""

_ByLevel = Mapping[tuple[str, float], Row]

_Value = Callable[[Reading, Reading], str]
"""Function that formats a reading, given also the full model's reading."""


def report(document: Output) -> str:
    """Return the tables of all measured parts under their headings, then those of the results."""
    parts = [
        f"## {heading}\n\n{show(from_json(document[part]))}"
        for part, heading, show in _PARTS
        if document[part]
    ]
    return "\n\n".join([*parts, as_markdown(TABLES, [document])])


# -- tables of eval/results ----------------------------------------------------------------------


def _perplexities(outputs: Sequence[Output]) -> Table:
    """Show perplexity over the whole model's, and over ``searched``'s where that gains least."""
    rows = _rows(outputs, "levels")
    found, levels = _by_method(rows), _levels_of(rows)
    lines = []
    for method, label in _LABELS.items():
        if (method, levels[0]) in found:
            cells = [_over_whole(found, rows, method, level) for level in levels]
            over = "" if method == _SEARCHED else _least_over_searched(found, method, levels)
            line = [label, *cells]
            lines.append([*(map(bold, line) if method == _SEARCHED else line), over])
    heads = ["", *map(percent, levels), f"over `{_SEARCHED}`"]
    return Table(heads, lines, "l".ljust(len(heads) - 1, "r") + "l")


def _agreement(outputs: Sequence[Output]) -> Table:
    """Show how often our methods agree with the whole model, and their divergence from it."""
    rows = _rows(outputs, "levels")
    found, levels = _by_method(rows), _levels_of(rows)
    ours = [name for name in (_SEARCHED, "uniform") if (name, levels[0]) in found]
    parts: list[tuple[str, Callable[[Reading], str]]] = [
        ("the whole model's likeliest token", lambda reading: percent(reading.same.mean(), 1)),
        ("KL divergence from it, nats", lambda reading: f"{reading.kl.mean():.3f}"),
    ]
    lines = []
    for title, show in parts:
        for name in ours:
            label = f"`{name}`: {title}" if name == ours[0] else f"`{name}`"
            lines.append([label, *(show(found[name, level].reading) for level in levels)])
    return Table(["", *map(percent, levels)], lines, "l".ljust(1 + len(levels), "r"))


def _calibrations(outputs: Sequence[Output]) -> Table:
    return _ratios(_rows(outputs, "calibration"), "tokens")


def _types(outputs: Sequence[Output]) -> Table:
    return _ratios(_rows(outputs, "types"), "")


def _ratios(rows: Sequence[Row], head: str) -> Table:
    """Show perplexity over the whole model's."""
    full = _full(rows)
    found = {
        key: _ratio(perplexity_ratio(row.reading, full).value)
        for key, row in _by_method(rows).items()
    }
    levels = _levels_of(rows)
    names = dict.fromkeys(name for name, _ in found)
    lines = [[name, *(found[name, level] for level in levels)] for name in names]
    return Table([head, *map(percent, levels)], lines, "l".ljust(1 + len(levels), "r"))


def _continuations(outputs: Sequence[Output]) -> Table:
    """Show contexts that change their level, over the whole model throughout."""
    found = _by_method(_rows(outputs, "continued"))
    origins, levels = (list(dict.fromkeys(keys)) for keys in zip(*found, strict=True))
    base = found[origins[0], levels[0]].reading
    lines: list[list[str]] = []
    for origin, level in zip(origins, levels, strict=True):
        over = [perplexity_ratio(found[origin, then].reading, base).value for then in levels]
        label = percent(level) if lines else f"first {percent(level)}"
        lines.append([label, *(f"{value:.4f}" for value in over)])
    first, *others = map(percent, levels)
    return Table(["", f"then {first}", *others], lines, "l".ljust(1 + len(levels), "r"))


def _cut_levels(outputs: Sequence[Output]) -> Table:
    """Show levels with whole and with cut keys and values: bytes of all matrices, perplexity."""
    parts = []
    for output in _whole_and_cut(outputs):
        rows, always = _rows([output], "levels"), output["always_computed"]
        full = _full(rows)
        parts.append(
            {
                row.level: [
                    percent(always + (1 - always) * row.share),
                    _ratio(perplexity_ratio(row.reading, full).value),
                ]
                for row in rows
                if row.method == _SEARCHED
            }
        )
    whole, cut = parts
    lines = [[percent(level), *whole[level], *cut[level]] for level in whole]
    heads = ["level", "bytes, whole", "perplexity", "bytes, cut", "perplexity"]
    return Table(heads, lines, "l".ljust(len(heads), "r"))


def _cut_continuations(outputs: Sequence[Output]) -> Table:
    """Show contexts that change their level, with whole and with cut keys and values."""
    tables = [_continuations([output]) for output in _whole_and_cut(outputs)]
    lines = [
        [f"{label}, {how}", *cells]
        for pair in zip(*(table.rows for table in tables), strict=True)
        for how, (label, *cells) in zip(("whole", "cut"), pair, strict=True)
    ]
    return tables[0]._replace(rows=lines)


def _whole_and_cut(outputs: Sequence[Output]) -> Sequence[Output]:
    """Return the output of a file with whole keys and values, and of one that cuts them.

    Raises:
        NoRowsError: These are other outputs.
    """
    cuts = [output.get("always_computed") == 0 for output in outputs]
    if cuts != [False, True]:
        raise NoRowsError("found other outputs, expected one with whole keys and values, one cut")
    return outputs


def _kinds(outputs: Sequence[Output]) -> Table:
    """Show perplexity over the whole model's, with its interval, for each kind of text."""
    rows = _rows(outputs, "kinds")
    found, levels = _by_method(rows), _levels_of([row for row in rows if row.level < 1])
    tables = [name for name in (_SEARCHED, "uniform") if any(name in row.method for row in rows)]
    lines = []
    for method, kind in (row.method.split(": ") for row in rows if row.method != FULL):
        if method == FULL:
            full = found[f"{FULL}: {kind}", 1.0].reading
            over = [
                between(perplexity_ratio(found[f"{name}: {kind}", level].reading, full), 3)
                for name in tables
                for level in levels
            ]
            lines.append([kind, number(perplexity(full)), *over])
    heads = [f"`{name}` {percent(level)}" for name in tables for level in levels]
    return Table(["", "whole model", *heads], lines, "l".ljust(2 + len(heads), "r"))


TABLES: Mapping[str, Maker] = {
    "elastic-perplexity": _perplexities,
    "elastic-agreement": _agreement,
    "elastic-calibration": _calibrations,
    "elastic-continued": _continuations,
    "elastic-cut-levels": _cut_levels,
    "elastic-cut-continued": _cut_continuations,
    "elastic-cut-continued-grouped": _cut_continuations,
    "elastic-types": _types,
    "elastic-kinds": _kinds,
}


def _rows(outputs: Sequence[Output], part: str) -> list[Row]:
    """Return the rows of a part.

    Raises:
        NoRowsError: The part was not measured.
    """
    rows = from_json(only(outputs).get(part, ()))
    if not rows:
        raise NoRowsError(f"the part {part} was not measured")
    return rows


def _by_method(rows: Sequence[Row]) -> _ByLevel:
    return {(row.method, row.level): row for row in rows if row.method != FULL}


def _levels_of(rows: Sequence[Row]) -> list[float]:
    return sorted({row.level for row in rows if row.method != FULL}, reverse=True)


def _over_whole(found: _ByLevel, rows: Sequence[Row], method: str, level: float) -> str:
    row = found.get((method, level))
    if row is None:
        return ""
    if row.share == 1:  # of so many layers, the next larger number is all
        shares = [Fraction(of.share).limit_denominator(512) for of in rows if of.method == method]
        n_layers = math.lcm(*(share.denominator for share in shares))
        return f"({n_layers} of {n_layers})"
    return _ratio(perplexity_ratio(row.reading, _full(rows)).value)


def _least_over_searched(found: _ByLevel, method: str, levels: Sequence[float]) -> str:
    """Return a method's perplexity over that of ``searched``, at the level where it is lowest."""
    ratios = [
        (perplexity_ratio(found[method, level].reading, found[_SEARCHED, level].reading), level)
        for level in levels
        if {(method, level), (_SEARCHED, level)} <= found.keys() and found[method, level].share < 1
    ]
    if not ratios:
        return ""
    ratio, level = min(ratios)
    return f"{between(ratio, 3)} at {percent(level)}"


def _ratio(value: float) -> str:
    return number(value, 3 if value < 10 else None)


# -- all rows ------------------------------------------------------------------------------------


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


def _continued(rows: Sequence[Row]) -> str:
    """Show contexts that change their level, also relative to one level throughout."""
    readings = {(row.method, row.level): row.reading for row in rows if row.method != FULL}
    origins, levels = (list(dict.fromkeys(keys)) for keys in zip(*readings, strict=True))
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
    ("continued", "Contexts that change their level, from the disk", _continued),
)
