"""Means of a method's answers, and paired differences from another one's, as cells of tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from llmaas_eval.deadlines.alone.answering import OURS
from llmaas_eval.deadlines.alone.cells import MEASURES, Case, Cells, Values
from llmaas_eval.stats import mean_interval
from llmaas_eval.tables import number, percent, spread

__all__ = ["GAINS", "IMPOSSIBLE", "compared", "gain", "mean"]

GAINS = tuple(f"ours − it: {name}" for name in MEASURES)
IMPOSSIBLE = "impossible"
_NATS = "nats"


def compared(cells: Cells, cases: Sequence[Case], by: str, base: str = OURS) -> Iterator[str]:
    """Yield a method's means over the cases that it and ours keep, and how much more ours has.

    Args:
        cells: Answers of a model.
        cases: Promises.
        by: Name of the method.
        base: Name of ours.
    """
    found = cells.joined(cases, [base, by])
    for name in MEASURES:
        yield mean(found[by], name) if found else IMPOSSIBLE
    for name in MEASURES:
        yield gain(found[base], found[by], name) if found and by != base else ""


def mean(values: Values, name: str) -> str:
    """Return the mean of a measure."""
    found = float(values[name].mean())
    return number(found, 3) if name == _NATS else percent(found, 1)


def gain(ours: Values, theirs: Values, name: str) -> str:
    """Return how much more of a measure ours has: points, or nats."""
    factor, digits = (1, 3) if name == _NATS else (100, 1)
    return spread(mean_interval(np.asarray(factor * (ours[name] - theirs[name]))), digits)
