"""Rows of a study as tables with paired intervals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.stats import mean_interval
from llmaas_eval.tables import (
    Maker,
    NoRowsError,
    Output,
    Table,
    bold,
    number,
    only,
    percent,
    signed,
    spread,
)
from llmaas_eval.tolerance.arms import Arm, Row
from llmaas_plugins.kv_chunks.config import KVChunksConfig

__all__ = [
    "ALL",
    "DISTANCE",
    "FINE",
    "KL",
    "LOW",
    "OWN",
    "PAPER",
    "PERPLEXITY",
    "TABLES",
    "Measure",
    "by_arm",
    "curves",
    "quality_table",
    "recall_table",
    "report",
    "task_table",
]

PAPER, FINE, LOW = (8, 4, 2), (4, 3, 2), (4, 2, 1)
ALL = tuple(range(8, 0, -1))
OWN = tuple(KVChunksConfig().levels)
"""Levels to choose from: the paper's, finer and lower ones, any, and the plugin's default."""

Arms = tuple[str, float]
"""Name and mean bits of an arm."""
Pair = tuple[Arms, Arms]

_MIXED = "all"
_OURS = Arm("ours", 4, OWN)
_LABELS = {
    "f16": "uncompressed",
    "ours": "ours",
    "recency": "newest first",
    "random": "random",
    "layers": "by layer",
    "linear": "all or nothing",
    "as printed": "Eq 3 as printed",
}
_SAME_BITS = ("recency", "random")
"""Rivals that give our bits to other chunks."""
_RIVALS = (
    Arm("int8"),
    Arm("static", 4),
    *(Arm(name, 4, OWN) for name in ("ours", "recency", "random", "layers")),
    *(Arm(name, 4, PAPER) for name in ("ours", "linear", "as printed")),
    Arm("static", 2),
    *(Arm(name, 2, LOW) for name in ("ours", "recency", "random", "layers")),
)
_RECALLED = (
    Arm("f16", 16),
    Arm("int8"),
    Arm("static", 4),
    *(Arm(name, 4, OWN) for name in ("ours", "random", "layers")),
    Arm("ours", 4, PAPER),
    Arm("static", 3),
    Arm("ours", 3, ALL),
    Arm("static", 2.5),
    *(Arm(name, 2.5, FINE) for name in ("ours", "random", "layers")),
    Arm("static", 2),
    *(Arm(name, 2, LOW) for name in ("ours", "random", "layers")),
    Arm("static", 1),
)
"""Arms in ``eval/results``."""


class Measure(NamedTuple):
    """A column of the rows, with its title and scale."""

    title: str
    key: str
    scale: float
    is_distance: bool = False

    def of(self, rows: Sequence[Row]) -> NDArray[np.float64]:
        """Return one value for each row."""
        values = self.scale * _values(rows, self.key)
        return np.abs(values) if self.is_distance else values


KL = Measure("KL in 1e-4 nats", "kl", 1e4)
PERPLEXITY = Measure("Log perplexity minus that of f16 cells, in %", "surprise", 100)
DISTANCE = Measure(
    "Absolute difference of log perplexity from that of f16 cells, in %", "surprise", 100, True
)


def report(document: Output) -> str:
    """Return a figure's tables in Markdown."""
    rows = document["rows"]
    return "\n\n".join(_REPORTS[document["settings"]["figure"]](rows))


def by_arm(rows: Iterable[Row]) -> dict[Arms, list[Row]]:
    """Return rows by arm and requested mean bits; each has the same texts in the same order."""
    found: dict[Arms, list[Row]] = {}
    for row in rows:
        found.setdefault((row["arm"], row["mean"]), []).append(row)
    return found


def quality_table(rows: Sequence[Row], shown: Sequence[Arm] | None = None) -> Table:
    """Return a table with one line for each of the arms ``shown``, by default for all.

    Differences are to ``static`` at the same mean bits, text by text. KL is in 1e-4 nats.
    """
    arms = by_arm(rows)
    heads = ["kept as", "bits", "stored", "KL", "less static's", "first 8 tokens"]
    heads += ["top-1 of first 8", "attention error"]
    lines = []
    for arm in _present(arms, shown):
        found = arms[arm]
        kl = number(_mean(found, "kl", 1e4))
        is_ours = _is(arm, _OURS)
        line = [
            f"{bold(_label(arm))} (default)" if is_ours else _label(arm),
            f"{_mean(found, 'bits'):.3g}",
            percent(_mean(found, "share"), 1),
            bold(kl) if is_ours else kl,
            _less_static(arms, arm, KL),
            number(_mean(found, "kl_first", 1e4)),
            percent(_mean(found, "top1_first"), 1),
            percent(_mean(found, "attention_error"), 1),
        ]
        lines.append(line)
    return Table(heads, lines, "lrrrlrrr")


def task_table(rows: Sequence[Row], pairs: Sequence[Pair], measure: Measure) -> Table:
    """Return a table of ``measure`` by task: both arms of each pair, and their difference."""
    heads, lines = ["task"], []
    for (a, mean), (b, _) in pairs:
        heads += [a, f"{b} at {mean:g} bits", "difference"]
    for task, arms in _by_task(rows):
        cells = [task]
        for one, other in pairs:
            cells += [number(measure.of(arms[arm]).mean(), 2) for arm in (one, other)]
            cells.append(_difference(arms, (one, other), measure))
        lines.append(cells)
    return Table(heads, lines, "l".ljust(len(heads), "r"))


def recall_table(rows: Sequence[Row], shown: Sequence[Arm] | None = None) -> Table:
    """Return a table of right answers by arm and probe, in percent."""
    probes = dict(sorted(_by_task(rows, mixed=False)))
    heads, right = ["kept as", "bits", "stored"], Measure("", "right", 100)
    for name in probes:
        heads += [f"`{name}`: right", "less f16's", "less static's"]
    lines = []
    for arm in _present(by_arm(rows), shown):
        found = by_arm(rows)[arm]
        label = _label(arm).removesuffix(" as ours")
        label = bold(label) if _is(arm, _OURS) else label
        line = [label, f"{arm[1]:g}", percent(_mean(found, "share"), 1)]
        for arms in probes.values():
            line.append(percent(_mean(arms[arm], "right"), 1))
            line.append(_less(arms, arm, ("f16", 16.0), right, 1))
            line.append(_less_static(arms, arm, right, 1))
        lines.append(line)
    return Table(heads, lines, "lrr" + "rll" * len(probes))


def curves(rows: Sequence[Row], value: str) -> dict[str, tuple[list[float], list[float]]]:
    """Return the share of f16's bytes and the mean of ``value``, by arm."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for (name, _), points in sorted(by_arm(rows).items(), key=lambda item: item[0][1]):
        shares, values = found.setdefault(name, ([], []))
        shares.append(_mean(points, "share"))
        values.append(_mean(points, value))
    return found


# -- tables of eval/results ----------------------------------------------------------------------


def _rivals(outputs: Sequence[Output]) -> Table:
    return quality_table(_rows(outputs, "fig12"), _RIVALS)


def _tasks(outputs: Sequence[Output]) -> Table:
    """Compare the default with static bits and with int8, by task."""
    ours, static, int8 = (_OURS.name, 4.0), ("static", 4.0), ("int8", 8.0)
    heads = ["task", "KL", "static's", "ours less static's", "perplexity, less static's"]
    heads += ["distance, less static's", "perplexity, less int8's"]
    lines = [
        [
            task,
            *(number(KL.of(arms[arm]).mean(), 2) for arm in (ours, static)),
            *(_difference(arms, (ours, static), of) for of in (KL, PERPLEXITY, DISTANCE)),
            _difference(arms, (ours, int8), PERPLEXITY),
        ]
        for task, arms in _by_task(_rows(outputs, "fig12"))
    ]
    return Table(heads, lines, "lrrllll")


def _curve(outputs: Sequence[Output]) -> Table:
    """Show KL by bits, for ways to give them to chunks."""
    arms = by_arm(_rows(outputs, "curve"))
    rivals = [Arm(name, levels=ALL) for name in ("ours", "recency", "random", "layers")]
    heads = ["bits", "stored", "static", *(_LABELS[arm.rival] for arm in rivals)]
    lines = []
    for mean in sorted({mean for _, mean in arms}, reverse=True):
        found = [arms[name, mean] for name in ("static", *(arm.name for arm in rivals))]
        line = [f"{mean:g}", percent(_mean(found[0], "share"), 1)]
        line += [number(_mean(each, "kl", 1e4)) for each in found]
        is_equal = np.array_equal(_values(found[0], "kl"), _values(found[1], "kl"))
        difference = _difference(arms, ((rivals[0].name, mean), ("static", mean)), KL)
        lines.append([*line, "" if is_equal else difference])
    return Table([*heads, "ours less static's"], lines, "rrrrrrrl")


def _recall(outputs: Sequence[Output]) -> Table:
    return recall_table(_rows(outputs, "recall"), _RECALLED)


def _rows(outputs: Sequence[Output], figure: str) -> Sequence[Row]:
    output = only(outputs)
    if (found := output["settings"]["figure"]) != figure:
        raise NoRowsError(f"found the output of {found}, expected that of {figure}")
    rows: Sequence[Row] = output["rows"]
    return rows


TABLES: Mapping[str, Maker] = {
    "tolerance-rivals": _rivals,
    "tolerance-tasks": _tasks,
    "tolerance-curve": _curve,
    "tolerance-recall": _recall,
}


# -- reports -------------------------------------------------------------------------------------


def _report_quality(rows: Sequence[Row]) -> list[str]:
    lines = [[_label(arm), _perplexity(found)] for arm, found in by_arm(rows).items()]
    perplexity = Table(["kept as", "perplexity against f16 cells"], lines, "lr")
    return [quality_table(rows).as_markdown(), perplexity.as_markdown()]


def _report_tasks(rows: Sequence[Row]) -> list[str]:
    """Show all arms, and ours less static's by task: KL at all means, perplexity at four bits."""
    ours = [arm for arm in by_arm(rows) if arm[0].startswith("ours")]
    pairs = [(arm, ("static", arm[1])) for arm in ours]
    at_4 = [pair for pair in pairs if pair[0][1] == 4]
    parts = _report_quality(rows)
    for measure, some in ((KL, pairs), (PERPLEXITY, at_4), (DISTANCE, at_4)):
        parts.append(f"{measure.title}:\n\n{task_table(rows, some, measure).as_markdown()}")
    int8 = [((_OURS.name, 4.0), ("int8", 8.0))]
    return [*parts, f"{PERPLEXITY.title}:\n\n{task_table(rows, int8, PERPLEXITY).as_markdown()}"]


def _report_curve(rows: Sequence[Row]) -> list[str]:
    output = {"settings": {"figure": "curve"}, "rows": rows}
    return [_curve([output]).as_markdown(), *_report_quality(rows)]


def _report_recall(rows: Sequence[Row]) -> list[str]:
    """Show all arms, and the nats of the right answers."""
    nats = Measure("", "nats", 1)
    parts = [recall_table(rows).as_markdown()]
    for task, arms in _by_task(rows, mixed=False):
        lines = [
            [
                _label(arm),
                f"{arm[1]:g}",
                number(_mean(found, "nats"), 2),
                _less_static(arms, arm, nats),
            ]
            for arm, found in arms.items()
        ]
        table = Table(["kept as", "bits", "nats", "less static's"], lines, "lrrr")
        parts.append(f"{task}:\n\n{table.as_markdown()}")
    return parts


_REPORTS = {
    "fig6b": _report_quality,
    "fig12": _report_tasks,
    "curve": _report_curve,
    "recall": _report_recall,
}


# -- cells ---------------------------------------------------------------------------------------


def _present(arms: Mapping[Arms, object], shown: Sequence[Arm] | None) -> list[Arms]:
    """Return the arms to show that were measured.

    Raises:
        NoRowsError: None was.
    """
    wanted = list(arms) if shown is None else [(arm.name, arm.mean) for arm in shown]
    found = [arm for arm in wanted if arm in arms]
    if not found:
        raise NoRowsError("found rows of none of the arms that the table shows")
    return found


def _is(arm: Arms, other: Arm) -> bool:
    return arm == (other.name, other.mean)


def _label(arm: Arms) -> str:
    """Return an arm's name for readers."""
    name, mean = arm
    rival = next((rival for rival in _LABELS if name.startswith(rival)), None)
    if rival is None:
        return f"{name}, newest {int(mean) + 1} bits" if mean % 1 and name == "static" else name
    if rival in _SAME_BITS:
        return f"{_LABELS[rival]}, same bits as ours"
    levels = name.removeprefix(rival).strip().replace("any", "any level")
    return f"{_LABELS[rival]}, {levels}" if levels else _LABELS[rival]


def _by_task(rows: Sequence[Row], *, mixed: bool = True) -> list[tuple[str, dict[Arms, list[Row]]]]:
    """Return each task with its rows by arm; ``mixed`` adds all tasks together."""
    tasks = dict.fromkeys(row["task"] for row in rows)
    found = [(task, by_arm(row for row in rows if row["task"] == task)) for task in tasks]
    return [*found, (_MIXED, by_arm(rows))] if mixed else found


def _values(rows: Sequence[Row], key: str) -> NDArray[np.float64]:
    return np.array([row[key] for row in rows], np.float64)


def _mean(rows: Sequence[Row], key: str, scale: float = 1) -> float:
    return scale * float(_values(rows, key).mean())


def _perplexity(rows: Sequence[Row]) -> str:
    found = mean_interval(_values(rows, "surprise"))
    mean, low, high = (100 * np.expm1(part) for part in found)
    return f"{signed(mean, 2)} % ({signed(low, 2)} to {signed(high, 2)})"


def _less_static(
    arms: Mapping[Arms, Sequence[Row]], arm: Arms, measure: Measure, digits: int | None = None
) -> str:
    return _less(arms, arm, ("static", arm[1]), measure, digits)


def _less(
    arms: Mapping[Arms, Sequence[Row]], arm: Arms, base: Arms, of: Measure, digits: int | None
) -> str:
    """Return how much an arm's mean exceeds another's; empty for the same arm or a missing one."""
    if arm == base or base not in arms or arm[0] == "f16":
        return ""
    difference = of.of(arms[arm]) - of.of(arms[base])
    if base[0] == "static" and arm[0].startswith("layers") and not difference.any():
        return "0 (static's own choice)"
    return spread(mean_interval(difference), digits)


def _difference(arms: Mapping[Arms, Sequence[Row]], pair: Pair, measure: Measure) -> str:
    one, other = (measure.of(arms[arm]) for arm in pair)
    return spread(mean_interval(one - other), 2)
