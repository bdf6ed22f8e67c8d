"""The study's results as a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from llmaas_eval.tables import Maker, NoRowsError, Output, Table, number, only, percent

__all__ = ["TABLES", "report"]


def report(document: Output) -> str:
    """Return the table, and how to read it."""
    about = f"Trained on {document['n_tokens']:,} tokens. The shares are of the weights in blocks."
    return f"{_perplexities([document]).as_markdown()}\n\n{about}"


def _perplexities(outputs: Sequence[Output]) -> Table:
    """Show the perplexity of levels and of models of as many weights, by kind of text."""
    rows = only(outputs)["rows"]
    if not rows:
        raise NoRowsError("nothing was measured")
    kinds = dict.fromkeys(row["kind"] for row in rows)
    found = {(row["level"], row["model"], row["kind"]): row for row in rows}
    lines = []
    for level, model in sorted(dict.fromkeys(key[:2] for key in found), key=lambda each: -each[0]):
        mine = [found[level, model, kind] for kind in kinds]
        cells = [percent(level), model, percent(mine[0]["share"])]
        cells += [f"{mine[0]['n_weights'] / 1e6:.1f}"]
        lines.append(cells + [number(math.exp(np.mean(row["loss"]))) for row in mine])
    heads = ["level", "model", "weights in blocks", "million weights in the file", *kinds]
    return Table(heads, lines, "rlrr" + "r" * len(kinds))


TABLES: Mapping[str, Maker] = {"scratch-perplexity": _perplexities}
"""Function that makes each table."""
