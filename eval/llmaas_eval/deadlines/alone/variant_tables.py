"""Tables of other weights, of concise prompts, and of prompts of which words are left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from llmaas_eval.deadlines.alone.answering import OURS
from llmaas_eval.deadlines.alone.cells import MEASURES, Case, Cells, Values, models_of
from llmaas_eval.deadlines.alone.comparing import GAINS, compared, gain, mean
from llmaas_eval.deadlines.alone.study import BEST, ONE_LEVEL, RANDOM, WIDEST
from llmaas_eval.tables import Maker, NoRowsError, Output, Table, percent

__all__ = ["TABLES"]

_RANDOM_WORDS = "random"


def _variants(outputs: Sequence[Output]) -> Table:
    """Show the answers under the apps' promises with other weights, or with shorter prompts.

    Ours uses the widest settings by time. The last column compares it with the first model's, if
    both keep the same promises of the same apps.
    """
    lines, first = list[list[str]](), None
    for model in models_of(outputs, has_all_settings=False):
        cells = Cells(outputs, model)
        cases = [*cells.app_cases().values()]
        kept = cells.kept(cases, [WIDEST])
        ours = (kept, cells.joined(kept, [WIDEST])[WIDEST]) if kept else None
        for by in cells.methods:
            if by not in {OURS, BEST, RANDOM, ONE_LEVEL}:
                n_apps = len(cells.kept(cases, [WIDEST, by]))
                more = _more(ours, first) if by == WIDEST else ""
                found = compared(cells, cases, by, WIDEST)
                lines.append([model, by, str(n_apps), *found, more])
        first = first or ours
    heads = ["model", "by", "apps", *MEASURES, *GAINS, "nats more than the first model"]
    return Table(heads, lines, "ll".ljust(len(heads), "r"))


def _shares(outputs: Sequence[Output]) -> Table:
    """Show the whole model's answers to prompts of which words are left out."""
    rows = [row for output in outputs for row in output["rows"] if row["row"] == "share"]
    if not rows:
        raise NoRowsError("no rows of shares")
    found: dict[tuple[str, float], list[Mapping[str, np.ndarray]]] = {}
    parts: dict[tuple[str, float], list[float]] = {}
    for row in rows:
        key = row["by"], row["share"]
        found.setdefault(key, []).append({name: np.array(row[name]) for name in MEASURES})
        parts.setdefault(key, []).append(row["kept"])
    values = {
        key: {name: np.concatenate([one[name] for one in some]) for name in MEASURES}
        for key, some in found.items()
    }
    lines = []
    for (by, share), mine in values.items():
        base = values.get((_RANDOM_WORDS, share))
        gains = [
            gain(mine, base, name) if base is not None and by != _RANDOM_WORDS else ""
            for name in MEASURES
        ]
        kept = percent(float(np.mean(parts[by, share])))
        lines.append([by, percent(share), kept, *(mean(mine, name) for name in MEASURES), *gains])
    heads = ["words by", "share", "kept", *MEASURES, *(f"{one} above random" for one in MEASURES)]
    return Table(heads, lines, "l".ljust(len(heads), "r"))


# -- inside --------------------------------------------------------------------------------------


_Kept = tuple[Sequence[Case], Values]
"""Promises that are kept, and the values of their questions."""


def _more(ours: _Kept | None, first: _Kept | None) -> str:
    """Return how many more nats ours has; nothing if the promises or the questions differ."""
    if ours is None or first is None or ours[0] != first[0]:
        return ""
    if len(ours[1]["nats"]) != len(first[1]["nats"]):
        return ""
    return gain(ours[1], first[1], "nats")


TABLES: Mapping[str, Maker] = {"alone-variants": _variants, "alone-shares": _shares}
