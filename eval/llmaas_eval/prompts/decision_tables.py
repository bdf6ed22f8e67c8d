"""Tables of what decisions for each prompt gain over a table of constants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.prompts.gap import BY_KIND, CONSTANT, ONE_LEVEL, ORACLE, PAPER
from llmaas_eval.prompts.rows import Row, mean_by_document, rows_of
from llmaas_eval.tables import Maker, Output, Table, number, only, percent, spread

__all__ = ["TABLES"]

Values = NDArray[np.float64]

_ALL, _NO_GAIN = "all", ("random", CONSTANT, ORACLE)


def _agreement(outputs: Sequence[Output]) -> Table:
    """Show the share of answers whose first tokens are the whole model's, by limit."""
    rows = rows_of(outputs, "decision")
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    lines = []
    for seconds, limits, some in _by_limit(rows):
        values = [number(100 * some[arm].mean(), 1) for arm in arms]
        lines.append([percent(seconds), limits, *values])
    return Table(["tiny model", "limits", *arms], lines, "ll" + "r" * len(arms))


def _gains(outputs: Sequence[Output]) -> Table:
    """Show the points that arms gain over the best constant, and their share of the gap.

    The paper's choice is compared with the best constant of its own settings, too.
    """
    rows, documents = rows_of(outputs, "decision"), _documents(outputs)
    arms = dict.fromkeys(row["arm"] for row in rows if row["arm"] not in _NO_GAIN)
    lines = []
    for seconds, limits, some in _by_limit(rows):
        gap = some[ORACLE] - some[CONSTANT]
        cells = [percent(seconds), limits, number(100 * gap.mean(), 1)]
        for arm in arms:
            gain = some[arm] - some[CONSTANT]
            cells.append(spread(100 * np.array(mean_by_document(gain, documents)), 1))
            if gap.mean() > 0:
                cells[-1] += f", {percent(gain.mean() / gap.mean())}"
        own = some[PAPER] - some[ONE_LEVEL]
        lines.append([*cells, spread(100 * np.array(mean_by_document(own, documents)), 1)])
    heads = ["tiny model", "limits", "gap, points", *arms, f"{PAPER} over {ONE_LEVEL}"]
    return Table(heads, lines, "ll" + "r" * (len(heads) - 2))


def _over_kinds(outputs: Sequence[Output]) -> Table:
    """Show the points that heads gain over a table for each kind of prompts."""
    rows, documents = rows_of(outputs, "decision"), _documents(outputs)
    arms = dict.fromkeys(
        row["arm"] for row in rows if row["arm"] not in (*_NO_GAIN, BY_KIND, ONE_LEVEL)
    )
    lines = []
    for seconds, limits, some in _by_limit(rows):
        gains = [mean_by_document(some[arm] - some[BY_KIND], documents) for arm in arms]
        cells = [spread(100 * np.array(gain), 1) for gain in gains]
        lines.append([percent(seconds), limits, *cells])
    return Table(["tiny model", "limits", *arms], lines, "ll" + "r" * len(arms))


# -- inside --------------------------------------------------------------------------------------


def _by_limit(rows: Sequence[Row]) -> Iterator[tuple[float, str, Mapping[str, Values]]]:
    """Yield the tiny model's time, limits, and arms' qualities; at last their means over limits."""
    for seconds in dict.fromkeys(row["seconds"] for row in rows):
        some = [row for row in rows if row["seconds"] == seconds]
        names = {row["arm"]: [np.array(one["quality"]) for one in some if one["arm"] == row["arm"]]
                 for row in some}  # fmt: skip
        limits = list(dict.fromkeys(tuple(row["limits"]) for row in some))
        for at, both in enumerate(limits):
            yield (
                seconds,
                " / ".join(f"{one} %" for one in both),
                {arm: values[at] for arm, values in names.items()},
            )
        yield seconds, _ALL, {arm: np.mean(values, axis=0) for arm, values in names.items()}


def _documents(outputs: Sequence[Output]) -> NDArray[np.str_]:
    return np.array(only(outputs)["settings"]["documents"])


TABLES: Mapping[str, Maker] = {
    "prompts-decision-agreement": _agreement,
    "prompts-decision-gains": _gains,
    "prompts-decision-over-kinds": _over_kinds,
}
