"""Rows of the studies' outputs, and values that are paired by unit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.stats import Interval
from llmaas_eval.tables import NoRowsError, Output
from llmaas_plugins.demo.interval import interval, resamples

__all__ = ["Row", "mean_by_document", "means", "paired", "rows_of"]

Row = Mapping[str, Any]


def rows_of(outputs: Sequence[Output], study: str) -> list[Row]:
    """Return the rows of a study's outputs.

    Raises:
        NoRowsError: No output is of that study.
    """
    rows = [row for one in outputs if one["settings"]["study"] == study for row in one["rows"]]
    if not rows:
        raise NoRowsError(f"there are no rows of {study}")
    return rows


def means(rows: Iterable[Row], unit: Callable[[Row], Any], key: str) -> dict[Any, float]:
    """Return the mean of a value over the rows of each unit."""
    values: dict[Any, list[float]] = {}
    for row in rows:
        values.setdefault(unit(row), []).append(float(row[key]))
    return {one: float(np.mean(some)) for one, some in values.items()}


def paired(
    found: Mapping[Any, float], base: Mapping[Any, float]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the values of the units that both have, in the same order."""
    units = [one for one in base if one in found]
    return np.array([found[one] for one in units]), np.array([base[one] for one in units])


def mean_by_document(values: NDArray[np.float64], documents: NDArray[np.str_]) -> Interval:
    """Return the mean of prompts; documents are resampled, as their prompts are alike."""
    _, number_of = np.unique(documents, return_inverse=True)
    sums, n = np.bincount(number_of, values), np.bincount(number_of)
    picks = resamples(len(n))
    return interval(float(values.mean()), sums[picks].sum(axis=1) / n[picks].sum(axis=1))
