"""The study's results as a Markdown table."""

from __future__ import annotations

from collections.abc import Iterable

from llmaas_eval.markdown import table
from llmaas_eval.window.study import Row

__all__ = ["report"]


def report(rows: Iterable[Row]) -> str:
    """Return a table with a line for each way."""
    heads = ["cells", "perplexity", "against evaluated again", "evaluated per token"]
    lines = []
    for row in rows:
        median, low, high = row.against_first
        against = f"× {median:.3f} ({low:.3f}–{high:.3f})"
        lines.append([row.name, f"{row.perplexity:.2f}", against, f"{row.evaluated:.2f}"])
    return table(heads, lines)
