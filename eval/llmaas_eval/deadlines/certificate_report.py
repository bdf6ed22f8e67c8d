"""Table of certificates: what they certify, and how often they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmaas_eval.tables import Maker, Output, Table, as_markdown

__all__ = ["TABLES", "report"]

_WHOLE = 1.0


def report(found: dict[str, Any]) -> str:
    """Return the table."""
    return as_markdown(TABLES, [found])


def _certificates(outputs: Sequence[Output]) -> Table:
    """Show for each app and answer how often the risk on other requests was within the limit."""
    lines = []
    for output in outputs:
        rows, most = output["rows"], output["settings"]["max_risk"]
        for key in dict.fromkeys((row["app"], row["n_tokens"]) for row in rows):
            some = [row for row in rows if (row["app"], row["n_tokens"]) == key]
            narrow = [row for row in some if row["level"] < _WHOLE]
            held = sum(row["risk"] <= most for row in some)
            all_held = sum(row["worst"] <= most for row in some)
            lines.append(
                [
                    key[0],
                    str(key[1]),
                    f"{len(narrow)} of {len(some)}",
                    f"{np.mean([row['level'] for row in some]):.3f}",
                    f"{100 * np.mean([row['risk'] for row in some]):.1f} %",
                    f"{held} of {len(some)}",
                    f"{all_held} of {len(some)}",
                ]
            )
    heads = [
        "app",
        "tokens of an answer",
        "certified below 100 %",
        "mean level",
        "measured risk",
        "narrowest setting holds",
        "all settings hold",
    ]
    return Table(heads, lines, "lrrrrrr")


TABLES: Mapping[str, Maker] = {"deadlines-certificate": _certificates}
