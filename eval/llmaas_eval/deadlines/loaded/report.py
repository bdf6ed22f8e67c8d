"""Tables of promises that were kept under load, and of the answers' quality."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from llmaas_eval.deadlines.loaded.questions import SETS, TASK_OF
from llmaas_eval.deadlines.loaded.systems import COMPRESSED, HALF_OF, SYSTEMS
from llmaas_eval.deadlines.loaded.traces import APP_NAMES
from llmaas_eval.stats import mean_interval
from llmaas_eval.tables import (
    Maker,
    NoRowsError,
    Output,
    Table,
    as_markdown,
    number,
    percent,
    spread,
)

__all__ = ["NOTE", "TABLES", "report"]

NOTE = (
    "Times are those of a random model, and answers those of a model of 7 M "
    "weights at the same levels: quality and times come from different models. A system that "
    "narrows the model as other papers do takes the time of our level of the same share."
)
NO_SCRATCH = "Models trained from scratch (PFS) are left out; `--scratch` adds them."
SPARSE = (
    f"{COMPRESSED} is LLMLingua-2 + contextual sparsity with our compressor, which keeps the "
    "promised share of the prompt, and with an oracle's choice of the promised share of neurons "
    "for each token of the answer. It is in time where our levels, one constant level per "
    "promise, are. That is in its favor: the compressor takes no time, shortened prompts that are "
    "warm have a stored prefix, and attention, which it never narrows, takes a level's time."
)
NO_SPARSE = (
    f"{COMPRESSED} (LLMLingua-2 + contextual sparsity) is left out, as no encoder of prompts was "
    "trained; `llmaas prompts learn` trains one."
)
_OURS, _SHORTER = "ours", "ours-shorter"
"""Systems that others are compared with: the second one if it was measured."""
_RIVALS = ("fifo-constant", "edf-constant")

_Row = Mapping[str, Any]


def report(document: Output) -> str:
    """Return all tables that the output has rows for, and how to read them."""
    rows, settings = document["rows"], document.get("settings", {})
    halves = [
        f"{HALF_OF} meets half of {row['kind']} requests with alpha {row['alpha']:g} at "
        f"{number(row['rate'])} requests/s."
        for row in rows
        if row["row"] == "half" and row["rate"] is not None
    ]
    sets = "; ".join(f"{app}: {name}" for app, name in SETS.items())
    if not settings.get("data", True):
        sets = "none; the questions are packaged text, whose values do not affect times"
    parts = [as_markdown(TABLES, [document]), *halves, NOTE]
    if any(row["row"] == "quality" for row in rows):
        parts.append(SPARSE if any(row.get("by") == COMPRESSED for row in rows) else NO_SPARSE)
        parts += [] if settings.get("scratch") else [NO_SCRATCH]
    if any(row.get("model") == "tuned" for row in rows):
        parts.append(f"The tuned model answers {', '.join(sorted({*TASK_OF.values()}))} questions.")
    return "\n\n".join([*parts, f"Sets: {sets}."])


# -- tables --------------------------------------------------------------------------------------


def _goodput(outputs: Sequence[Output]) -> Table:
    """Show the highest rate at which 90 % of all requests keep both limits."""
    rows = _rows(outputs, "goodput")
    rates = {(row["system"], row["kind"], row["alpha"]): row["rate"] for row in rows}
    lines = []
    for row in rows:
        case = row["kind"], row["alpha"]
        rivals = [_ratio(row["rate"], _best(rates, rival, case)) for rival in _RIVALS]
        rate = "none" if row["rate"] is None else number(row["rate"])
        lines.append(
            [_label(row), row["kind"], _alpha(row), percent(row["possible"]), rate, *rivals]
        )
    heads = ["system", "prompts", "alpha", "possible when idle", "goodput, requests/s"]
    return Table([*heads, *(f"over the best {rival}" for rival in _RIVALS)], lines, "llrrrrr")


def _loaded(outputs: Sequence[Output]) -> Table:
    """Show how many promises each system keeps, by app, at rates of several systems."""
    lines = []
    for row in sorted(_shared(_rows(outputs, "probe")), key=_order):
        apps = row["apps"].values()
        n = sum(each["n"] for each in apps)
        cells = [_label(row), row["kind"], _alpha(row), number(row["rate"])]
        cells += [_share(row["apps"][app], "both") for app in APP_NAMES]
        is_planned = SYSTEMS[row["system"]].levels == "planned"
        cells += [
            percent(sum(each[name] for each in apps) / n, 1)
            if name != "silent" or is_planned
            else ""
            for name in ("ttft", "tpot", "both", "silent")
        ]
        lines.append(cells)
    heads = ["system", "prompts", "alpha", "requests/s", *APP_NAMES]
    heads += ["first token", "further tokens", "both", "missed unflagged"]
    return Table(heads, lines, "ll".ljust(len(heads), "r"))


def _rates(outputs: Sequence[Output]) -> Table:
    """Show the share of requests that keep both limits, by system and rate."""
    met: dict[tuple[str, str, float], dict[float, float]] = {}
    for row in _rows(outputs, "probe"):
        apps = row["apps"].values()
        share = sum(each["both"] for each in apps) / sum(each["n"] for each in apps)
        met.setdefault((row["system"], row["kind"], row["alpha"]), {})[row["rate"]] = share
    rates = sorted({rate for found in met.values() for rate in found})
    if len(rates) < 2:
        raise NoRowsError("probes at two or more rates are needed")
    lines = [
        [
            SYSTEMS[system].label,
            kind,
            number(alpha, 2),
            *(percent(found[rate], 1) if rate in found else "" for rate in rates),
        ]
        for (system, kind, alpha), found in met.items()
    ]
    heads = ["system", "prompts", "alpha", *(f"{number(rate)}/s" for rate in rates)]
    return Table(heads, lines, "ll".ljust(len(heads), "r"))


def _quality(outputs: Sequence[Output]) -> Table:
    """Show how good the answers are at the rates of several systems; late ones count as wrong."""
    rows = _shared(_rows(outputs, "quality"))
    ours = _SHORTER if any(row["by"] == _SHORTER for row in rows) else _OURS
    pooled = _pooled(rows, ours)
    lines = [_quality_line(row, some, ours) for some in (rows, pooled) for row in some]
    heads = ["model", "system", "prompts", "alpha", "requests/s", "requests", "in time"]
    heads += ["agrees", "right", "nats over whole"]
    heads += [f"{SYSTEMS[ours].label} − it: {name}" for name in ("agrees", "right")]
    return Table(heads, lines, "lll".ljust(len(heads), "r"))


def _shortened(outputs: Sequence[Output]) -> Table:
    """Show how many prompts were shortened, and the mean share that was read, by app."""
    rows = [row for row in _rows(outputs, "probe") if SYSTEMS[row["system"]].shortens]
    if not rows:
        raise NoRowsError("no system shortens prompts")
    lines = []
    for row in sorted(rows, key=_order):
        cells = [_label(row), row["kind"], _alpha(row), number(row["rate"])]
        for app in APP_NAMES:
            one = row["apps"][app]
            read = "" if one["read"] is None else f", {percent(one['read'])} read"
            cells.append(f"{_share(one, 'shortened')}{read}")
        lines.append(cells)
    heads = ["system", "prompts", "alpha", "requests/s", *APP_NAMES]
    return Table(heads, lines, "ll".ljust(len(heads), "r"))


TABLES: Mapping[str, Maker] = {
    "deadlines-goodput": _goodput,
    "deadlines-loaded": _loaded,
    "deadlines-rates": _rates,
    "deadlines-quality": _quality,
    "deadlines-shortened": _shortened,
}


# -- inside --------------------------------------------------------------------------------------


def _rows(outputs: Sequence[Output], kind: str) -> list[_Row]:
    """Return the rows of a kind; of equal ones in several outputs, the last counts."""
    keys = ("model", "by", "system", "kind", "alpha", "rate")
    found = {
        tuple(row.get(key) for key in keys if (kind, key) != ("goodput", "rate")): row
        for output in outputs
        for row in output["rows"]
        if row["row"] == kind
    }
    if not found:
        raise NoRowsError(f"no rows of {kind}")
    return [*found.values()]


def _shared(rows: Sequence[_Row]) -> Sequence[_Row]:
    """Return the rows at rates at which several systems were measured; all if there are none."""
    systems: dict[tuple[Any, ...], set[str]] = {}
    for row in rows:
        systems.setdefault((row["kind"], row["alpha"], row["rate"]), set()).add(row["system"])
    found = [row for row in rows if len(systems[row["kind"], row["alpha"], row["rate"]]) > 1]
    return found or rows


def _order(row: _Row) -> tuple[Any, ...]:
    return row["kind"], row["alpha"], row["rate"], list(SYSTEMS).index(row["system"])


def _label(row: _Row) -> str:
    by = row.get("by", row["system"])
    if by in SYSTEMS:
        return SYSTEMS[by].label
    return f"{by}, FIFO" if by == COMPRESSED else f"{by}, FIFO at one level"


def _alpha(row: _Row) -> str:
    return "all" if row["alpha"] is None else number(row["alpha"], 2)


def _ratio(rate: float | None, base: float | None) -> str:
    return "" if rate is None or base is None else f"{number(rate / base, 2)}×"


def _best(
    rates: Mapping[tuple[str, str, float], float | None], rival: str, case: tuple[str, float]
) -> float | None:
    """Return the highest goodput of a rival over all shares of the promise that it uses."""
    found = [
        rate
        for (system, *rest), rate in rates.items()
        if system.startswith(rival) and rate and (*rest,) == case
    ]
    return max(found, default=None)


def _share(counts: Mapping[str, int], name: str) -> str:
    return percent(counts[name] / counts["n"]) if counts["n"] else ""


def _quality_line(row: _Row, rows: Sequence[_Row], by: str) -> list[str]:
    ours = next((other for other in rows if other["by"] == by and _is_same(other, row)), None)
    met, agrees, right, nats = (
        np.array(row[name], float) for name in ("is_met", "agrees", "right", "nats")
    )
    rate = "" if row["rate"] is None else number(row["rate"])
    cells = [row["model"], _label(row), row["kind"], _alpha(row), rate, str(len(met))]
    cells += [percent(float(each.mean()), 1) for each in (met, agrees, right)]
    cells.append(number(float(nats.mean()), 3))
    for name, own in (("agrees", agrees), ("right", right)):
        is_compared = ours is not None and row["by"] != by
        gain = 100 * (np.array(ours[name], float) - own) if ours and is_compared else None
        cells.append("" if gain is None else spread(mean_interval(gain), 1))
    return cells


def _is_same(one: _Row, other: _Row) -> bool:
    keys = ("model", "kind", "alpha", "rate")
    return all(one[key] == other[key] for key in keys)


def _pooled(rows: Sequence[_Row], by: str) -> list[_Row]:
    """Return rows that join the mixes of apps, at the rates at which ours was measured, too."""
    groups: dict[tuple[str, ...], list[_Row]] = {}
    for row in rows:
        if any(other["by"] == by and _is_same(other, row) for other in rows):
            groups.setdefault((row["model"], row["by"], row["system"], row["kind"]), []).append(row)
    mixes = {key: [(row["alpha"], row["rate"]) for row in some] for key, some in groups.items()}
    return [
        {**some[0], "alpha": None, "rate": None} | dict(_joined(some))
        for key, some in groups.items()
        if len({alpha for alpha, _ in mixes[key]}) > 1
        and mixes[key] == mixes.get((key[0], by, by, key[3]))
    ]


def _joined(rows: Sequence[_Row]) -> Iterator[tuple[str, list[float]]]:
    for name in ("is_met", "agrees", "right", "nats"):
        yield name, [value for row in rows for value in row[name]]
