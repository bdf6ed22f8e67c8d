"""Tables of one promise on whole sets: by method, over a grid, and by the way a setting is chosen.

Intervals are paired over the questions, which all methods answered. Where several apps are joined,
their number is shown: they are those whose promises all that is compared can keep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmaas_eval.deadlines.alone.answering import OURS
from llmaas_eval.deadlines.alone.cells import MEASURES, Case, Cells, models_of
from llmaas_eval.deadlines.alone.comparing import GAINS, IMPOSSIBLE, compared, gain, mean
from llmaas_eval.deadlines.alone.overhead_tables import TABLES as OVERHEAD
from llmaas_eval.deadlines.alone.promises import APART, TOGETHER
from llmaas_eval.deadlines.alone.study import BEST, ONE_LEVEL, RANDOM, WIDEST
from llmaas_eval.deadlines.alone.variant_tables import TABLES as VARIANTS
from llmaas_eval.deadlines.loaded.baselines import SCRATCH
from llmaas_eval.deadlines.loaded.traces import SHARES
from llmaas_eval.tables import (
    Maker,
    NoRowsError,
    Output,
    Table,
    as_markdown,
    percent,
)

__all__ = ["TABLES", "report"]

_NOTE = (
    "Times are those of a random model, and answers those of a model of 7 M weights at the same "
    "levels: quality and times come from different models. A method that narrows the model as "
    "other papers do takes the time of our level of the same share."
)
_NO_RIVALS = (WIDEST, BEST, RANDOM)
_WAYS = (BEST, OURS, WIDEST, ONE_LEVEL, RANDOM)


def report(document: Output) -> str:
    """Return all tables that the output has rows for, and how to read them."""
    return f"{as_markdown(TABLES, [document])}\n\n{_NOTE}"


# -- tables --------------------------------------------------------------------------------------


def _apps(outputs: Sequence[Output]) -> Table:
    """Show each method's answers to each app's set under its promise, and over all of them."""
    lines = []
    for model in models_of(outputs):
        cells = Cells(outputs, model)
        cases = cells.app_cases()
        for app, case in cases.items():
            for by in cells.methods:
                about = [model, app, _promise(case), by, _levels(cells.levels(case, by))]
                lines.append([*about, *compared(cells, [case], by)])
        for by in cells.methods:
            every = [*cases.values()]
            n_apps = len(cells.kept(every, [OURS, by]))
            about = [model, f"{n_apps} of {len(every)} apps", "each its own", by, ""]
            lines.append([*about, *compared(cells, every, by)])
    heads = ["model", "app", "promise", "by", "prompt / answer", *MEASURES, *GAINS]
    return Table(heads, lines, "lllll".ljust(len(heads), "r"))


def _grid(outputs: Sequence[Output]) -> Table:
    """Show how much better ours is than models trained from scratch, over a grid of promises."""
    lines, furthers = list[list[str]](), list[float]()
    for model in models_of(outputs):
        cells = Cells(outputs, model)
        if SCRATCH not in cells.methods:
            continue
        by_promise = _by_promise(cells, APART)
        furthers = sorted({further for _, further in by_promise}, reverse=True)
        firsts = sorted({first for first, _ in by_promise}, reverse=True)
        for name in MEASURES:
            for first in firsts:
                some = [by_promise[first, further] for further in furthers]
                gains = [_gain_over(cells, one, SCRATCH, name) for one in some]
                lines.append([model, name, percent(first), *gains])
    if not lines:
        raise NoRowsError("no rows of models that were trained from scratch")
    heads = ["model", "ours − PFS", "first token", *map(percent, furthers)]
    return Table(heads, lines, "ll".ljust(len(heads), "r"))


def _answer_time(outputs: Sequence[Output]) -> Table:
    """Show how much better ours is than each method under limits of the whole answer's time."""
    lines, others = list[list[str]](), list[str]()
    for model in models_of(outputs):
        cells = Cells(outputs, model)
        others = [by for by in cells.methods if by not in {OURS, *_NO_RIVALS}]
        by_promise = _by_promise(cells, TOGETHER)
        for name in MEASURES:
            for (limit, _), cases in by_promise.items():
                kept = cells.kept(cases, [OURS])
                found = cells.joined(kept, [OURS])
                cell = [str(len(kept)), mean(found[OURS], name) if kept else IMPOSSIBLE]
                cell += [_gain_over(cells, kept, by, name) for by in others]
                lines.append([model, name, percent(limit), *cell])
    if not lines:
        raise NoRowsError("no rows of limits of the whole answer")
    heads = ["model", "measure", "limit", "apps", OURS, *(f"ours − {by}" for by in others)]
    return Table(heads, lines, "ll".ljust(len(heads), "r"))


def _ways(outputs: Sequence[Output]) -> Table:
    """Show how often answers agree by the way in which ours chooses a feasible setting."""
    lines = []
    for model in models_of(outputs):
        cells = Cells(outputs, model)
        by_promise = _by_promise(cells, APART)
        for first, further in _app_promises(cells, by_promise):
            cases = by_promise[first, further]
            found = cells.joined(cases, _WAYS)
            if found:
                n_apps = len(cells.kept(cases, _WAYS))
                line = [model, _promise(Case("", APART, first, further)), str(n_apps)]
                for by in _WAYS:
                    line.append(percent(float(found[by]["agrees"].mean()), 1))
                    if by != RANDOM:
                        line.append(gain(found[by], found[RANDOM], "agrees"))
                lines.append(line)
    heads = ["model", "promise", "apps"]
    for by in _WAYS:
        heads += [by] if by == RANDOM else [by, "points above random"]
    return Table(heads, lines, "ll".ljust(len(heads), "r"))


TABLES: Mapping[str, Maker] = {
    "alone-apps": _apps,
    "alone-grid": _grid,
    "alone-answer-time": _answer_time,
    "alone-ways": _ways,
    **VARIANTS,
    **OVERHEAD,
}


# -- inside --------------------------------------------------------------------------------------


def _by_promise(cells: Cells, kind: str) -> Mapping[tuple[float, float], list[Case]]:
    """Return the cases of all sets by their limits, widest first."""
    found: dict[tuple[float, float], list[Case]] = {}
    for case in sorted(cells.cases(kind), key=lambda case: (-case.first, -case.further)):
        found.setdefault((case.first, case.further), []).append(case)
    return found


def _app_promises(
    cells: Cells, by_promise: Mapping[tuple[float, float], Sequence[Case]]
) -> list[tuple[float, float]]:
    """Return the apps' promises; in place of one that ours cannot keep, the next wider one."""
    found = dict[tuple[float, float], None]()
    for least, further in reversed([*SHARES.values()]):
        firsts = sorted(
            first
            for first, other in by_promise
            if other == further
            and first >= least
            and cells.joined(by_promise[first, other], [OURS])
        )
        found |= dict.fromkeys((first, further) for first in firsts[:1])
    return [*found]


def _gain_over(cells: Cells, cases: Sequence[Case], by: str, name: str) -> str:
    """Return how much more of a measure ours has, and for how many apps if not for all."""
    kept = cells.kept(cases, [OURS, by])
    if not kept:
        return IMPOSSIBLE
    found = cells.joined(kept, [OURS, by])
    apps = "" if len(kept) == len(cases) else f", {len(kept)} of {len(cases)} apps"
    return f"{gain(found[OURS], found[by], name)}{apps}"


def _promise(case: Case) -> str:
    return f"{percent(case.first)} / {percent(case.further)}"


def _levels(levels: Sequence[Sequence[float]]) -> str:
    """Return the settings as text, without repetitions."""
    return ", ".join(dict.fromkeys(" / ".join(map(percent, pair)) for pair in levels))
