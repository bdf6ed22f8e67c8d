"""The study's results as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmaas_eval.stats import median_interval
from llmaas_eval.tables import Maker, NoRowsError, Output, Table, number, only, percent

__all__ = ["TABLES", "report"]

_MIB = 1 << 20
_SHOWN = 4
"""First tokens of a draft whose acceptance is shown."""


def report(document: Output) -> str:
    """Return both tables."""
    return f"{_times([document]).as_markdown()}\n\n{_accepted([document]).as_markdown()}"


def _rows(outputs: Sequence[Output]) -> Sequence[dict[str, Any]]:
    rows: Sequence[dict[str, Any]] = only(outputs)["rows"]
    if not rows:
        raise NoRowsError("nothing was measured")
    return rows


def _times(outputs: Sequence[Output]) -> Table:
    """Show the time of a token without and with drafts."""
    lines = []
    for row in _rows(outputs):
        exact, drafting = (np.array(row[name]) for name in ("exact_s", "drafts_s"))
        ratio, low, high = median_interval(exact / drafting)
        (drafts,) = row["drafts"]["drafts"]
        per_pass = drafts["accepted"] / max(1, drafts["passes"])
        lines.append([
            percent(row["share"]),
            number(row["budget"] / _MIB, 0),
            number(1e3 * float(np.median(exact)), 0),
            number(1e3 * float(np.median(drafting)), 0),
            f"{ratio:.2f}× ({low:.2f}–{high:.2f})",
            "none" if drafts["level"] is None else percent(drafts["level"]),
            number(drafts["proposed"] / max(1, drafts["passes"]), 1),
            number(per_pass, 2),
            number(max(row[side]["peak_bytes"] for side in ("exact", "drafts")) / _MIB, 0),
        ])  # fmt: skip
    heads = ["memory, share of the model", "MiB", "`exact`, ms", "with drafts, ms", "faster",
             "level", "drafted a pass", "accepted a pass", "peak, MiB"]  # fmt: skip
    return Table(heads, lines, "rrrrrrrrr")


def _accepted(outputs: Sequence[Output]) -> Table:
    """Show how often the first tokens of the packaged model's drafts are all right."""
    found = _rows(outputs)[0]["accepted_by_place"]
    lines = [
        [percent(float(level)), *(percent(share) for share in shares[:_SHOWN])]
        for level, shares in found.items()
    ]
    heads = ["level", "1 token right", *(f"{n} tokens" for n in range(2, _SHOWN + 1))]
    return Table(heads, lines, "rrrrr")


TABLES: Mapping[str, Maker] = {
    "pinned-drafts": _times,
    "pinned-drafts-slow-disk": _times,
    "pinned-drafts-accepted": _accepted,
}
"""Functions that make the tables."""
