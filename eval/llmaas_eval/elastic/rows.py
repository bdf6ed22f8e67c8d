"""What the study measured, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from llmaas_eval.elastic.readings import Reading, perplexity

__all__ = ["FULL", "INTERPOLATED", "OURS", "Found", "Row", "as_json"]

FULL = "full"
"""The method that leaves nothing out."""
OURS = "uniform", "searched"
"""What our methods' names begin with."""
INTERPOLATED = ", interpolated"
"""What names end with of methods that come in steps, between two of these."""


class Row(NamedTuple):
    """One model.

    Attributes:
        method: What it was narrowed by.
        level: What it was narrowed to; 1: not at all.
        share: Of the blocks' bytes, what it uses, K and V projections apart.
        reading: How it reads.
    """

    method: str
    level: float
    share: float
    reading: Reading


Found = Mapping[str, Sequence[Row]]
"""Rows by part of the study."""


def as_json(found: Found) -> dict[str, list[dict[str, Any]]]:
    """With means by window, so that whatever else is asked of them can be computed later."""
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
