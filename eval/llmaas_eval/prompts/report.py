"""Tables of the studies of shorter prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmaas_eval.prompts import (
    break_even_tables,
    decision_tables,
    design_tables,
    gap_tables,
    narrow_tables,
    short_tables,
    word_scorer_tables,
)
from llmaas_eval.tables import Maker, as_markdown

__all__ = ["TABLES", "report"]

TABLES: Mapping[str, Maker] = {
    **narrow_tables.TABLES,
    **gap_tables.TABLES,
    **short_tables.TABLES,
    **break_even_tables.TABLES,
    **decision_tables.TABLES,
    **word_scorer_tables.TABLES,
    **design_tables.TABLES,
}


def report(found: dict[str, Any]) -> str:
    """Return the study's tables."""
    return as_markdown(TABLES, [found])
