"""Tables of kept promises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmaas_eval.deadlines.study import APPS, FASTEST, KINDS, Sample
from llmaas_eval.tables import Maker, NoRowsError, Output, Table, as_markdown, number, percent

__all__ = ["TABLES", "report"]

_PHASES = {"ttft": "first token", "tpot": "further tokens"}
_QUANTILE = 95


def report(found: dict[str, Any]) -> str:
    """Return the table, and the totals."""
    samples = [Sample(**row) for row in found["rows"]]
    return f"{as_markdown(TABLES, [found])}\n\n{_totals(samples)}"


def _promises(outputs: Sequence[Output]) -> Table:
    """Show how many promises of each app were kept, of those that the fastest setting can keep."""
    samples = [Sample(**row) for output in outputs for row in output["rows"]]
    heads = ["app", "promise", "prompt"]
    for name in _PHASES.values():
        heads += [f"{name}: level", "kept", "called feasible", "prediction off by"]
    lines = []
    for app, promise in APPS.items():
        for kind in KINDS:
            cells = [app, " / ".join(promise), kind]
            for phase in _PHASES:
                cells += _cells(samples, app, kind, phase)
            lines.append(cells)
    return Table(heads, lines, "lll" + "rrrr" * len(_PHASES))


def _shares(outputs: Sequence[Output]) -> Table:
    """Show which share of a cold prompt requests read, and whether that kept the first token."""
    samples = [Sample(**row) for output in outputs for row in output["rows"]]
    if all(one.share == 1 for one in samples):
        raise NoRowsError("every prompt was read whole")
    lines = []
    for app, promise in APPS.items():
        some = [one for one in samples if (one.app, one.kind, one.phase) == (app, "cold", "ttft")]
        shortened = [one.share for one in some if one.share < 1]
        lines.append([
            app,
            " / ".join(promise),
            f"{len(shortened)} of {len(some)}",
            percent(float(np.median(shortened))) if shortened else "",
            f"{np.median([one.level for one in some]):.1f}",
            f"{sum(one.measured_ms <= one.promised_ms for one in some)} of {len(some)}",
            f"{sum(one.is_feasible for one in some)} of {len(some)}",
            number(float(np.median([one.promised_ms for one in some])), 0),
            number(float(np.median([one.measured_ms for one in some])), 0),
        ])  # fmt: skip
    heads = ["app", "promise", "prompts shortened", "tokens read", "level", "first token in time",
             "called feasible", "promised, ms", "measured, ms"]  # fmt: skip
    return Table(heads, lines, "llrrrrrrr")


def _cells(samples: Sequence[Sample], app: str, kind: str, phase: str) -> list[str]:
    some = [one for one in samples if (one.app, one.kind, one.phase) == (app, kind, phase)]
    levels = f"{np.median([one.level for one in some]):.1f}"
    off = f"{100 * np.median([_error(one) for one in some]):.0f} %"
    possible = [one for one in some if _is_possible(samples, one)]
    if not possible:
        flagged = sum(not one.is_feasible for one in some)
        return [levels, "impossible", f"{len(some) - flagged} of {len(some)}", off]
    kept = sum(one.measured_ms <= one.promised_ms for one in possible)
    called = sum(one.is_feasible for one in possible)
    n = len(possible)
    return [levels, f"{kept} of {n}", f"{called} of {n}", off]


def _totals(samples: Sequence[Sample]) -> str:
    served = [one for one in samples if one.app != FASTEST]
    possible = [one for one in served if _is_possible(samples, one)]
    kept = sum(one.measured_ms <= one.promised_ms for one in possible)
    called = sum(one.is_feasible for one in possible)
    silent = sum(one.measured_ms > one.promised_ms for one in served if one.is_feasible)
    off = 100 * np.median([_error(one) for one in served])
    return (
        f"{len(possible)} of {len(served)} limits are possible: the fastest setting keeps them in "
        f"{_QUANTILE} % of its requests. {kept} of these were kept, {called} were called feasible. "
        f"{silent} limits were missed without a flag. Predictions are off by {off:.1f} % in the "
        "median."
    )


def _is_possible(samples: Sequence[Sample], one: Sample) -> bool:
    """Return whether the fastest setting's measured 95th percentile is within the promise."""
    fastest = [
        other.measured_ms
        for other in samples
        if (other.app, other.kind, other.phase) == (FASTEST, one.kind, one.phase)
    ]
    return bool(np.percentile(fastest, _QUANTILE) <= one.promised_ms)


def _error(one: Sample) -> float:
    return abs(one.expected_ms - one.measured_ms) / one.measured_ms


TABLES: Mapping[str, Maker] = {"deadlines-unloaded": _promises, "prompts-unloaded": _shares}
