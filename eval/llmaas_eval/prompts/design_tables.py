"""Tables of what parts of the design give, and of strategies under one limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.prompts.design_outcomes import (
    ALL_LIMITS,
    STEP_SIZES,
    WHOLE,
    Outcomes,
    costs_of,
    in_part,
    in_steps,
    limited,
    mean_of_possible,
    parts,
    steps,
    strategies,
)
from llmaas_eval.prompts.gap import Cost
from llmaas_eval.prompts.rows import Row, mean_by_document, rows_of
from llmaas_eval.tables import Maker, Output, Table, between, only, percent, spread

__all__ = ["EXAMPLE", "TABLES"]

Values = NDArray[np.float64]

EXAMPLE, _TIGHT = (50, 80), (40, 100)
"""Limits of the paper's Fig 4b, and those of its Fig 5."""
_LEVELS = (1.0, 0.8, 0.5)
"""Levels of Fig 5's strategies, beside the widest one that reads whole prompts."""
_MISSING = "impossible"


def _parts(outputs: Sequence[Output]) -> Table:
    """Show what the whole design reaches, and the points that are lost without each part."""
    rows, cost = _read(outputs)
    documents = in_part(rows, WHOLE).documents
    found = {limits: parts(rows, cost, limits) for limits in ALL_LIMITS}
    names = [name for name in next(iter(found.values())) if name != WHOLE]
    lines = []
    for limits, reached in found.items():
        if (whole := reached[WHOLE]) is not None:
            lost = [_lost(reached, name, documents) for name in names]
            lines.append([_shown(limits), _share(whole, documents), *lost])
    cells = ["all", _share(mean_of_possible(one[WHOLE] for one in found.values()), documents)]
    lines.append([*cells, *(_lost(_mean(found, name), name, documents) for name in names)])
    heads = ["limits", "agree", *(f"without {name}" for name in names)]
    return Table(heads, lines, "l" + "r" * (len(heads) - 1))


def _steps(outputs: Sequence[Output]) -> Table:
    """Show what steps of several sizes reach with the best constant, and with the oracle."""
    rows, cost = _read(outputs)
    documents, lines = in_steps(rows).documents, list[list[str]]()
    found = {limits: steps(rows, cost, limits) for limits in ALL_LIMITS}
    possible = [one for one in found.values() if all(pair[0] is not None for pair in one.values())]
    means: Mapping[int, tuple[Values, ...]] = {
        size: tuple(mean_of_possible(one[size][i] for one in possible) for i in range(2))
        for size in STEP_SIZES
    }
    for name, one in {
        **{_shown(limits): one for limits, one in found.items()},
        "all": means,
    }.items():
        cells = [name]
        for i in range(2):
            base = one[10][i]
            cells.append(_MISSING if base is None else _share(base, documents))
            cells += [_more(one[size][i], base, documents) for size in STEP_SIZES if size != 10]
        lines.append(cells)
    heads = ["limits", "10 %: best constant", "20 %: points more", "5 %: points more"]
    heads += ["10 %: oracle", "20 %: points more", "5 %: points more"]
    return Table(heads, lines, "l" + "r" * (len(heads) - 1))


def _strategies(outputs: Sequence[Output]) -> Table:
    """Show what strategies reach under one limit, and how far they are from the oracle."""
    rows, cost = _read(outputs)
    of, found = in_steps(rows), strategies(rows, cost, EXAMPLE)
    kinds = list(dict.fromkeys(of.kinds.tolist()))
    lines = []
    for name, values in found.items():
        assert values is not None
        cells = [name, _share(values, of.documents)]
        cells += [_more(values, found[base], of.documents) for base in ("random", "oracle")]
        cells += [percent(values[of.kinds == kind].mean()) for kind in kinds]
        lines.append(cells)
    heads = ["strategy", "agree", "points above random", "points above oracle", *kinds]
    return Table(heads, lines, "l" + "r" * (len(heads) - 1))


def _sensitive(outputs: Sequence[Output]) -> Table:
    """Show strategies that take equally long, and how often only one of them is right."""
    rows, cost = _read(outputs)
    of = in_steps(rows)
    picks = _equal_times(of, cost)
    right = np.stack([of.right[:, at] for at in picks])
    kinds = list(dict.fromkeys(of.kinds.tolist()))
    lines = []
    for at, mine in zip(picks, right, strict=True):
        one = of.some[at]
        only_mine = mine * (right.sum(axis=0) == 1)
        cells = [percent(one.share), percent(one.prefill), _share(mine, of.documents)]
        cells.append(_share(only_mine, of.documents))
        lines.append([*cells, *(percent(mine[of.kinds == kind].mean()) for kind in kinds)])
    is_any, is_all = right.max(axis=0), right.min(axis=0)
    for name, values in (("any of them", is_any), ("some, not all", is_any - is_all)):
        cells = [name, "", _share(values, of.documents), ""]
        lines.append([*cells, *(percent(values[of.kinds == kind].mean()) for kind in kinds)])
    heads = ["share of the prompt", "level", "agree", "only this one agrees", *kinds]
    return Table(heads, lines, "ll" + "r" * (len(heads) - 2))


# -- inside --------------------------------------------------------------------------------------


def _read(outputs: Sequence[Output]) -> tuple[Sequence[Row], Mapping[float, Cost]]:
    rows = rows_of(outputs, "design")
    return rows, costs_of(only(outputs)["settings"]["costs"])


def _equal_times(of: Outcomes, cost: Mapping[float, Cost]) -> list[int]:
    """Return the longest prompts at some levels, and the widest level for whole prompts."""
    allowed = np.flatnonzero(limited(of, cost, _TIGHT)).tolist()
    found = [
        max(some, key=lambda at: of.some[at].share)
        for level in _LEVELS
        if (some := [at for at in allowed if of.some[at].prefill == level])
    ]
    whole = [at for at in allowed if of.some[at].share == 1]
    return [*found, *([max(whole, key=lambda at: of.some[at].prefill)] if whole else [])]


def _mean(
    found: Mapping[tuple[int, int], Mapping[str, Values | None]], name: str
) -> Mapping[str, Values | None]:
    """Return the means over the limits that are possible without a part, too."""
    both = [one for one in found.values() if one[WHOLE] is not None and one[name] is not None]
    return {one: mean_of_possible(each[one] for each in both) for one in (WHOLE, name)}


def _lost(reached: Mapping[str, Values | None], name: str, documents: NDArray[np.str_]) -> str:
    return _more(reached[name], reached[WHOLE], documents)


def _more(values: Values | None, base: Values | None, documents: NDArray[np.str_]) -> str:
    if values is None or base is None:
        return _MISSING
    return spread(100 * np.array(mean_by_document(values - base, documents)), 1)


def _share(values: Values, documents: NDArray[np.str_]) -> str:
    return between(100 * np.array(mean_by_document(values, documents)), 1, " %")


def _shown(limits: tuple[int, int]) -> str:
    return " / ".join(f"{one} %" for one in limits)


TABLES: Mapping[str, Maker] = {
    "prompts-strategies": _strategies,
    "prompts-equal-times": _sensitive,
    "prompts-design-steps": _steps,
    "prompts-design-parts": _parts,
}
