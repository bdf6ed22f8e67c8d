"""Tables of words that replace a prompt: by scorer, by size of the tiny model, and by stretch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.prompts.rows import Row, mean_by_document, rows_of
from llmaas_eval.tables import Maker, Output, Table, between, number, only, percent, spread

__all__ = ["MEASURES", "TABLES", "Measure", "shown_scorers", "values_of"]

Values = NDArray[np.float64]


class Measure(NamedTuple):
    """A measure of a shortened prompt.

    Attributes:
        key: Its name in rows.
        name: Its name in tables.
        scale: Factor for its unit in tables.
        digits: Digits after the point.
        unit: Its unit.
    """

    key: str
    name: str
    scale: float
    digits: int
    unit: str


MEASURES = (
    Measure("agrees", "agree", 100, 1, " %"),
    Measure("kl", "KL, nats", 1, 3, ""),
)
_BY_WORD = "words"
_DEFAULT, _ALL_TRAINED = "6 layers, 3 shared", "6 layers, 0 shared"
_NAMES = {_DEFAULT: "score head", _ALL_TRAINED: "encoder, all of it trained"}
"""Names of tiny models where others are compared with them."""


def values_of(rows: Sequence[Row], key: str, **about: Any) -> tuple[Values, NDArray[np.str_]]:
    """Return the values of rows that have these fields, and their documents, by prompt."""
    some = [row for row in rows if all(row[name] == value for name, value in about.items())]
    some.sort(key=lambda row: row["number"])
    return np.array([float(row[key]) for row in some]), np.array([row["document"] for row in some])


def shown_scorers(rows: Sequence[Row]) -> Mapping[str, str]:
    """Return the names of the scorers that all shares have, by their names in rows."""
    shares = {row["share"] for row in rows}
    found = dict.fromkeys(row["scorer"] for row in rows)
    return {
        name: _NAMES.get(name, name)
        for name in found
        if {row["share"] for row in rows if row["scorer"] == name and not row["is_timed"]} == shares
    }


def _by_share(outputs: Sequence[Output]) -> Table:
    """Show for each scorer and share how well the words replace the prompt."""
    rows = rows_of(outputs, "word_scorers")
    shares = sorted({row["share"] for row in rows}, reverse=True)
    lines = []
    for measure in MEASURES:
        for scorer, name in shown_scorers(rows).items():
            cells = [measure.name, name]
            for share in shares:
                found = values_of(rows, measure.key, **_way(scorer, share))
                mean = np.array(mean_by_document(*found))
                cells.append(between(measure.scale * mean, measure.digits, measure.unit))
            lines.append(cells)
    heads = ["measure", "words by", *map(percent, shares)]
    return Table(heads, lines, "ll" + "r" * len(shares))


def _score_head(outputs: Sequence[Output]) -> Table:
    """Show how far the score head is above each other scorer with the same prompts and shares."""
    rows = rows_of(outputs, "word_scorers")
    others = [name for name in shown_scorers(rows) if name != _DEFAULT]
    lines = []
    for measure in MEASURES:
        for share in sorted({row["share"] for row in rows}, reverse=True):
            own = _way(_DEFAULT, share)
            gains = [_gain(rows, measure, own, _way(other, share)) for other in others]
            lines.append([measure.name, percent(share), *gains])
    heads = ["score head's", "share", *(f"minus {_NAMES.get(name, name)}" for name in others)]
    return Table(heads, lines, "lr" + "r" * len(others))


def _sizes(outputs: Sequence[Output]) -> Table:
    """Show tiny models of several sizes with equal tokens and in equal time, over the first one."""
    rows, lines = rows_of(outputs, "word_scorers"), list[list[str]]()
    shares = sorted({row["share"] for row in rows if row["is_timed"]}, reverse=True)
    for size in only(outputs)["settings"]["sizes"]:
        name = size["scorer"]
        cells = [name, f"{size['n_active'] / 1e6:.1f} M", percent(size["auc"], 1)]
        for is_timed in (False, True):
            for share in shares:
                own = _way(name, share, is_timed)
                values, _ = values_of(rows, "kl", **own)
                cell = number(float(values.mean()), 3)
                if name != _DEFAULT:
                    base = _way(_DEFAULT, share, is_timed)
                    cell += f", {_gain(rows, MEASURES[1], own, base)}"
                cells.append(cell)
        lines.append(cells)
    heads = ["tiny model", "weights in layers", "AUC"]
    heads += [f"KL, {percent(share)} of the tokens" for share in shares]
    heads += [f"KL, {percent(share)} of the time" for share in shares]
    return Table(heads, lines, "l" + "r" * (len(heads) - 1))


def _stretches(outputs: Sequence[Output]) -> Table:
    """Show how much better or worse whole stretches are than single words, at equal tokens."""
    rows, lines = rows_of(outputs, "word_scorers"), list[list[str]]()
    units = [one for one in dict.fromkeys(row["unit"] for row in rows) if one != _BY_WORD]
    names = dict.fromkeys(row["scorer"] for row in rows if row["unit"] != _BY_WORD)
    for name in names:
        for unit in units:
            for share in sorted({row["share"] for row in rows}, reverse=True):
                own, words = _way(name, share) | {"unit": unit}, _way(name, share)
                kept, _ = values_of(rows, "kept", **own)
                kept_words, _ = values_of(rows, "kept", **words)
                cells = [_NAMES.get(name, name), unit, percent(share)]
                cells.append(f"{number(100 * (kept - kept_words).mean(), 1)}")
                cells += [_gain(rows, measure, own, words) for measure in MEASURES]
                lines.append(cells)
    heads = ["words by", "kept as", "share", "points of tokens more"]
    heads += ["answers that agree, points", "KL, nats"]
    return Table(heads, lines, "llrrrr")


# -- inside --------------------------------------------------------------------------------------


def _way(scorer: str, share: float, is_timed: bool = False) -> dict[str, Any]:
    return {"scorer": scorer, "unit": _BY_WORD, "share": share, "is_timed": is_timed}


def _gain(
    rows: Sequence[Row], measure: Measure, own: Mapping[str, Any], base: Mapping[str, Any]
) -> str:
    values, documents = values_of(rows, measure.key, **own)
    bases, _ = values_of(rows, measure.key, **base)
    gain = mean_by_document(values - bases, documents)
    return spread(measure.scale * np.array(gain), measure.digits)


TABLES: Mapping[str, Maker] = {
    "prompts-words-by-share": _by_share,
    "prompts-score-head": _score_head,
    "prompts-tiny-sizes": _sizes,
    "prompts-stretches": _stretches,
}
