"""Scored rows as JSON, and by user."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from llmaas_eval.knn.scoring import Row
from llmaas_eval.stats import Surprise
from llmaas_plugins.knn_lm.mixing.mixture import Mixture

__all__ = ["By", "as_json", "by_user", "from_json"]

By = dict[str, dict[str, Row]]
"""Rows by user, then by method."""


def as_json(row: Row) -> dict[str, Any]:
    """Return a row for JSON."""
    return row._asdict() | {
        "mixture": row.mixture and row.mixture.as_json(),
        "surprise": {"nats": row.surprise.nats.tolist(), "n": row.surprise.n.tolist()},
    }


def from_json(values: Mapping[str, Any]) -> Row:
    """Return the row that ``as_json`` turned into ``values``."""
    fields = {name: values[name] for name in Row._fields}
    mixture, surprise = fields["mixture"], fields["surprise"]
    fields["mixture"] = None if mixture is None else Mixture.from_json(mixture)
    nats, n = np.array(surprise["nats"], float), np.array(surprise["n"], np.int64)
    return Row(**fields | {"surprise": Surprise(nats, n)})


def by_user(rows: Iterable[Row]) -> By:
    """Group rows by user, then by method."""
    found: By = {}
    for row in rows:
        found.setdefault(row.user, {})[row.method] = row
    return found
