"""Rows of the studies' outputs, and values that are paired by unit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.tables import NoRowsError, Output

__all__ = ["Row", "means", "paired", "rows_of"]

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
