"""Table of the lengths from which on a shorter prompt is faster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmaas_eval.prompts.rows import rows_of
from llmaas_eval.tables import Maker, Output, Table, number, percent

__all__ = ["TABLES"]

_NEVER = "never"


def _break_even(outputs: Sequence[Output]) -> Table:
    """Show times of whole prompts and of halves with their scorer.

    The last columns are the largest share that is faster than the whole prompt, and the level at
    which the whole prompt takes no longer than the scorer and a half.
    """
    heads = ["model", "threads", "tokens", "scorer", "whole, ms", "scorer, ms", "with half, ms"]
    heads += ["of the whole", "faster below", "as fast: level"]
    lines = []
    for row in rows_of(outputs, "break_even"):
        about = "" if row["is_measured"] else "≈ "
        ms = [f"{about}{number(row[key])}" for key in ("whole_ms", "scorer_ms", "shorter_ms")]
        lines.append([
            row["model"],
            str(row["n_threads"]),
            f"{row['n_tokens']:,}",
            row["scorer"],
            *ms,
            percent(row["shorter_ms"] / row["whole_ms"]),
            _NEVER if row["share"] is None else percent(row["share"]),
            "below all" if row["level"] is None else percent(row["level"]),
        ])  # fmt: skip
    return Table(heads, lines, "lrrlrrrrrr")


TABLES: Mapping[str, Maker] = {"prompts-break-even": _break_even}
