"""Results of the study, and their form as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from llmaas_eval.elastic.readings import Reading, perplexity

__all__ = ["FULL", "INTERPOLATED", "OURS", "Found", "Row", "as_json", "from_json"]

FULL = "full"
"""Method name of the whole model."""
OURS = "uniform", "searched"
"""Beginnings of our methods' names."""
INTERPOLATED = ", interpolated"
"""Suffix of a method's name where its result is interpolated between two numbers of layers."""


class Row(NamedTuple):
    """Result of one model.

    Attributes:
        method: Method that shrank the model.
        level: Level that it was shrunk to; 1 for the whole model.
        share: Share of the bytes of the blocks' units in use.
        reading: Loss and agreement on the test text.
    """

    method: str
    level: float
    share: float
    reading: Reading


Found = Mapping[str, Sequence[Row]]
"""Rows by part of the study."""


def as_json(found: Found) -> dict[str, list[dict[str, Any]]]:
    """Return the rows for JSON, with means by window so that more can be computed later."""
    return {
        part: [
            {
                "method": row.method,
                "level": row.level,
                "share": row.share,
                "perplexity": perplexity(row.reading),
                **{name: values.tolist() for name, values in row.reading._asdict().items()},
            }
            for row in rows
        ]
        for part, rows in found.items()
    }


def from_json(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return a part's rows that ``as_json`` turned into ``rows``."""
    return [
        Row(
            row["method"],
            row["level"],
            row["share"],
            Reading(*(np.array(row[name], np.float64) for name in Reading._fields)),
        )
        for row in rows
    ]
