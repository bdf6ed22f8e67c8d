"""Tables of the best constant setting against the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.prompts.gap import LIMITS, Chosen, Setting, chosen, costs, feasible, settings
from llmaas_eval.prompts.rows import Row, rows_of
from llmaas_eval.results import load
from llmaas_eval.stats import mean_interval
from llmaas_eval.tables import Maker, Output, Table, between, number, percent, spread

__all__ = ["TABLES"]

Values = NDArray[np.float64]
Quality = Callable[[Sequence[Row]], Values]

_N_ANSWER = 4
_READING = ("attention", "self_information")
"""Scorers that read the prompt at the narrowest level."""


def _agreement(outputs: Sequence[Output]) -> Table:
    """Show the share of answers whose first tokens are all the whole model's."""
    heads = ["scorer", "limits", "best constant", "agree", "best by kind", "oracle"]
    heads += ["gap of the constant, points"]
    heads += ["whole prompts only", "agree", "gain of shares, points"]
    lines = []
    for scorer, limits, both, widths in _by_limit(outputs, _is_agreeing):
        gap = 100 * np.array(mean_interval(both.oracle - both.constant))
        gain = 100 * np.array(mean_interval(both.constant - widths.constant)) if widths else None
        cells = [scorer, limits, _name(both.best), _percent(both.constant)]
        cells += [_percent(both.by_kind), _percent(both.oracle), spread(gap, 1)]
        cells += [_name(widths.best), _percent(widths.constant)] if widths else ["impossible", ""]
        lines.append([*cells, "" if gain is None else spread(gain, 1)])
    return Table(heads, lines, "lllrrrrlrr")


def _nats(outputs: Sequence[Output]) -> Table:
    """Show by how many nats the whole model's answer is less likely than with the whole model."""
    heads = ["scorer", "limits", "best constant", "nats lost", "best by kind", "oracle", "gap"]
    heads += ["whole prompts only", "nats lost", "gain of shares"]
    lines = []
    for scorer, limits, both, widths in _by_limit(outputs, _likelihood):
        cells = [scorer, limits, _name(both.best), number(-both.constant.mean(), 2)]
        gap = mean_interval(both.oracle - both.constant)
        cells += [number(-one.mean(), 2) for one in (both.by_kind, both.oracle)]
        cells.append(spread(gap, 2))
        if widths is None:
            lines.append([*cells, "impossible", "", ""])
            continue
        gain = mean_interval(both.constant - widths.constant)
        cells += [_name(widths.best), number(-widths.constant.mean(), 2), spread(gain, 2)]
        lines.append(cells)
    return Table(heads, lines, "lllrrrrlrr")


def _kinds(outputs: Sequence[Output]) -> Table:
    """Show agreement by kind of prompt with single changes of the whole setting."""
    rows = rows_of(outputs, "oracle_gap")
    found = outputs[0]["settings"]
    some = settings(found["shares"], found["prefills"], found["decodes"])
    alone = [one for one in some if sum(value < 1 for value in one) == 1]
    kinds = dict.fromkeys(row["kind"] for row in rows)
    lines = []
    for scorer in found["scorers"]:
        for one in alone:
            if one.share == 1 and scorer != found["scorers"][0]:
                continue  # it has no scorer
            cells = [scorer if one.share < 1 else "", _name(one)]
            for kind in kinds:
                quality = _is_agreeing(
                    [row for row in rows if (row["kind"], row["scorer"]) == (kind, scorer)]
                )
                cells.append(_percent(quality[:, some.index(one)]))
            lines.append(cells)
    return Table(["scorer", "setting", *kinds], lines, "ll" + "r" * len(kinds))


# -- inside --------------------------------------------------------------------------------------


def _by_limit(
    outputs: Sequence[Output], quality_of: Quality
) -> Iterator[tuple[str, str, Chosen, Chosen | None]]:
    """Yield scorer, limits, and what is chosen with all settings and with whole prompts only.

    Limits that no setting meets are left out.
    """
    rows, found = rows_of(outputs, "oracle_gap"), outputs[0]["settings"]
    some = settings(found["shares"], found["prefills"], found["decodes"])
    cost, is_whole = costs(load("elastic-time")), np.array([one.share == 1 for one in some])
    narrowest = min(one.prefill for one in cost.values())
    for scorer, name, seconds in _timed(found["scorers"], narrowest):
        mine = [row for row in rows if row["scorer"] == scorer]
        quality, kinds = quality_of(mine), np.array([row["kind"] for row in mine])
        for limits in LIMITS:
            may = feasible(some, cost, (limits[0] / 100, limits[1] / 100), seconds)
            if not may.any():
                continue
            widths = may & is_whole
            yield (
                name,
                " / ".join(f"{one} %" for one in limits),
                chosen(quality, some, may, kinds),
                chosen(quality, some, widths, kinds) if widths.any() else None,
            )


def _timed(scorers: Sequence[str], narrowest: float) -> Iterator[tuple[str, str, float]]:
    """Yield scorers, how tables name them, and the time that counts, a share of the whole model's.

    Scorers that read the prompt at the narrowest level come without and with that time.
    """
    for scorer in scorers:
        yield scorer, scorer, 0.0
        if scorer in _READING:
            yield scorer, f"{scorer}, timed", narrowest


def _is_agreeing(rows: Sequence[Row]) -> Values:
    return _flat([np.array(row["leads"]) == _N_ANSWER for row in rows])


def _likelihood(rows: Sequence[Row]) -> Values:
    """Return the change of the answer's log likelihood by prompt and setting."""
    return _flat([np.ravel(row["nats"])[0] - np.array(row["nats"]) for row in rows])


def _flat(values: Sequence[NDArray[np.generic]]) -> Values:
    return np.array([np.ravel(one) for one in values], np.float64)


def _name(setting: Setting) -> str:
    """Return a setting in percent: share, prefill level and decode level."""
    return " · ".join(percent(value) for value in setting)


def _percent(values: Values) -> str:
    return between(100 * np.array(mean_interval(values)), 1, " %")


TABLES: Mapping[str, Maker] = {
    "prompts-oracle-agreement": _agreement,
    "prompts-oracle-nats": _nats,
    "prompts-oracle-kinds": _kinds,
}
