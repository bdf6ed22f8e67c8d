"""Rows as JSON and as Markdown tables with paired intervals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from llmaas_eval.knn.scoring import Row
from llmaas_eval.markdown import table
from llmaas_eval.stats import Interval, Surprise, change, mean_change, perplexity

__all__ = ["as_json", "by_user", "changes_table", "means_table", "users_table"]

By = dict[str, dict[str, Row]]


def by_user(rows: Iterable[Row]) -> By:
    """Group rows by user, then by method."""
    found: By = {}
    for row in rows:
        found.setdefault(row.user, {})[row.method] = row
    return found


def users_table(rows: Sequence[Row]) -> str:
    """Return a table of perplexity: one line per user, one column per method.

    Further columns have the numbers of history pairs and of scored pairs.
    """
    users = by_user(rows)
    methods = list(next(iter(users.values())))
    lines = []
    for user, found in users.items():
        pure = found["pure"]
        cells = [user, f"{pure.n_history:,}", f"{pure.surprise.n.sum():,}"]
        cells += [f"{perplexity(found[method].surprise):.3f}" for method in methods]
        lines.append(cells)
    return table(["user", "history", "scored", *methods], lines)


def changes_table(rows: Sequence[Row], methods: Sequence[str], bases: Sequence[str]) -> str:
    """Return a table of each method's change of perplexity from each of ``bases``, in percent.

    There is one line per user and one for the mean over users.
    """
    users = by_user(rows)
    pairs = [(method, base) for method in methods for base in bases]
    lines = [
        [user, *(_shown(change(found[a].surprise, found[b].surprise)) for a, b in pairs)]
        for user, found in users.items()
    ]
    lines.append(["**mean**", *(_shown(_mean(users, *pair)) for pair in pairs)])
    return table(["user", *(f"{a} to {b}" for a, b in pairs)], lines)


def means_table(rows: Sequence[Row], bases: Sequence[str]) -> str:
    """Return a table with one line per method: its share of pairs and mean change per base."""
    users = by_user(rows)
    methods = [name for name in next(iter(users.values())) if name != "pure"]
    lines = []
    for method in methods:
        share = [found[method].n_pairs / found[method].n_history for found in users.values()]
        changes = [_shown(_mean(users, method, base)) if base != method else "" for base in bases]
        lines.append([method, f"{sum(share) / len(share):.1%}", *changes])
    return table(["method", "kept", *(f"to {base}" for base in bases)], lines)


def as_json(row: Row) -> dict[str, Any]:
    """Return a row for JSON."""
    return row._asdict() | {
        "mixture": row.mixture and row.mixture.as_json(),
        "surprise": {"nats": row.surprise.nats.tolist(), "n": row.surprise.n.tolist()},
    }


def _mean(users: By, method: str, base: str) -> Interval:
    pairs: list[tuple[Surprise, Surprise]] = [
        (found[method].surprise, found[base].surprise) for found in users.values()
    ]
    return mean_change(pairs)


def _shown(found: Interval) -> str:
    return f"{found.value:+.2f} % ({found.low:+.2f} to {found.high:+.2f})"
