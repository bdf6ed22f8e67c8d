"""Rows as JSON, and as tables with paired intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from llmaas_eval.knn.drift import DRIFTS
from llmaas_eval.knn.methods import OURS, RIVALS
from llmaas_eval.knn.rows import By, by_user, from_json
from llmaas_eval.knn.scoring import Row
from llmaas_eval.stats import Interval, Surprise, change, mean_change, perplexity
from llmaas_eval.tables import (
    Maker,
    NoRowsError,
    Output,
    Table,
    bold,
    number,
    only,
    percent,
    signed,
    spread,
)

__all__ = [
    "TABLES",
    "changes_table",
    "means_table",
    "perplexity_table",
    "report",
]

_BOLD = "offline"
_SHOWN = ("full", *OURS, "offline, top", "online, top", "merging")
_PERPLEXITIES = ("pure", "full", "random", "merging", *OURS, "offline, top", "online, top")
_TEXTS = {
    "novels": "novels",
    "wikitext": "WikiText-2",
    "a stranger's": "another user's chats",
    "own": "own chats",
}
_WRITTEN = {
    "alone, temperature 0.8": "alone, temperature 0.8",
    "with the datastore, temperature 0.8": "with the datastore, temperature 0.8",
    "cloud model": "the cloud model's own answers",
    "alone, greedy": "alone, greedy",
    "with the datastore, greedy": "with the datastore, greedy",
}
_DIMS, _DEFAULT_DIMS = (32, 64, 128, 256), 128
_THRESHOLDS = (0.99, 0.95, 0.9, 0.7)
_NUMBERS = ("no users", "one", "two", "three", "four", "five", "six", "seven", "eight")


def report(document: Output) -> str:
    """Return a figure's tables in Markdown."""
    tables = _REPORTS[document["settings"]["figure"]](document)
    return "\n\n".join(table.as_markdown() for table in tables)


def perplexity_table(rows: Sequence[Row]) -> Table:
    """Return a table of perplexity: one line per user, one column per method."""
    users = by_user(rows)
    found = {method for of in users.values() for method in of}
    methods = [name for name in _PERPLEXITIES if name in found]
    lines = []
    for user, of in users.items():
        cells = [_name(name, number(perplexity(of[name].surprise))) for name in methods]
        lines.append([user, f"{of['pure'].n_history:,}", *cells])
    heads = ["user", "pairs", *(_name(name, name) for name in methods)]
    return Table(heads, lines, "l".ljust(len(heads), "r"))


def means_table(
    rows: Sequence[Row], methods: Sequence[str], bases: Sequence[str], head: str = "method"
) -> Table:
    """Return a table with one line per method: its share of pairs and mean change per base."""
    users, lines = by_user(rows), []
    for method in _measured(users, methods):
        cells = [
            _name(method, _changed(users, method, base)) if base != method else "" for base in bases
        ]
        lines.append([_name(method, method), percent(_kept(users, method)), *cells])
    heads = [head, "kept", *(f"to {base}" for base in bases)]
    return Table(heads, lines, "l".ljust(len(heads), "r"))


def changes_table(rows: Sequence[Row], methods: Sequence[str], bases: Sequence[str]) -> Table:
    """Return a table of each method's change of perplexity from each of ``bases``, in percent.

    There is one line per user and one for the mean over users.
    """
    users = by_user(rows)
    pairs = [(method, base) for method in methods for base in bases]
    lines = [
        [user, *(_percents(change(found[a].surprise, found[b].surprise)) for a, b in pairs)]
        for user, found in users.items()
    ]
    lines.append([bold("mean"), *(_changed(users, *pair) for pair in pairs)])
    heads = ["user", *(f"{a} to {b}" for a, b in pairs)]
    return Table(heads, lines, "l".ljust(len(heads), "r"))


# -- tables of eval/results ----------------------------------------------------------------------


def _users(outputs: Sequence[Output]) -> Table:
    lines = []
    for row in _rows(outputs, "users"):
        counts = [str(row[name]) for name in ("n_train", "n_test", "n_removed")]
        lines.append([f"{row['user']} ({row['set']})", *counts, f"{row['known']:.0%}"])
    return Table(["user (set)", "training", "test", "removed", "known"], lines, "lrrrr")


def _perplexities(outputs: Sequence[Output]) -> Table:
    return perplexity_table(_scored(outputs, "table2"))


def _means(outputs: Sequence[Output]) -> Table:
    rows = _scored(outputs, "table2")
    users = by_user(rows)
    n = len(users)
    bases = _measured(users, ("pure", *RIVALS))
    return means_table(rows, _SHOWN, bases, f"mean of the {_NUMBERS[n] if n < 9 else n}")


def _rules(outputs: Sequence[Output]) -> Table:
    """Show how both rules of selection change perplexity, by the model's own perplexity."""
    users = by_user(_scored(outputs, "table2"))
    pairs = (("offline", "random"), ("offline, top", "random"), ("offline, top", "offline"))
    surest_first = sorted(users.items(), key=lambda item: perplexity(item[1]["pure"].surprise))
    lines = []
    for user, found in surest_first:
        full = change(found["full"].surprise, found["pure"].surprise)
        lines.append([
            user,
            number(perplexity(found["pure"].surprise)),
            f"{signed(full.value, 1)} %",
            *(_percents(change(found[a].surprise, found[b].surprise)) for a, b in pairs),
        ])  # fmt: skip
    heads = ["user", "pure", "full", "draw to random", "top to random", "top to draw"]
    return Table(heads, lines, "l".ljust(len(heads), "r"))


def _by_share(outputs: Sequence[Output]) -> Table:
    """Show the mean change to the model alone by the share of kept pairs."""
    users = by_user(_scored(outputs, "fig9"))
    found = [name.rpartition(" ") for name in next(iter(users.values())) if name.count(" ")]
    shares = sorted({float(share) for _, _, share in found})
    lines = []
    for method in dict.fromkeys(name for name, _, _ in found):
        cells = []
        for share in shares:
            name = f"{method} {share:g}"
            kept = _kept(users, name)
            fewer = f" (keeps {100 * kept:.0f})" if kept < 0.95 * share else ""
            cells.append(signed(_mean(users, name, "pure").value, 1) + fewer)
        lines.append([method, *cells])
    heads = ["kept", *(percent(share) for share in shares)]
    return Table(heads, lines, "l".ljust(len(heads), "r"))


def _equal(outputs: Sequence[Output]) -> Table:
    """Show Algorithm 2 beside methods that keep as many pairs."""
    users = by_user(_scored(outputs, "equal"))
    found = next(iter(users.values()))
    methods = [name for name in _PERPLEXITIES if name in found]
    others = [name for name in (*RIVALS, "offline", "stream") if name in found]
    lines = []
    for user, of in users.items():
        kept = percent(of["online"].n_pairs / of["online"].n_history)
        cells = [number(perplexity(of[name].surprise)) for name in methods]
        changes = [_percents(change(of["online"].surprise, of[name].surprise)) for name in others]
        lines.append([user, kept, *cells, *changes])
    if len(users) > 1:
        means = [_changed(users, "online", name) for name in others]
        lines.append([bold("mean"), *[""] * (1 + len(methods)), *means])
    heads = ["user", "kept", *methods, *(f"online to {name}" for name in others)]
    return Table(heads, lines, "l".ljust(len(heads), "r"))


def _drift(outputs: Sequence[Output]) -> Table:
    """Show users whose interests change, tested on B, then on B and C."""
    methods = ("full", "random", "offline", "stream")
    lines: list[list[str]] = []
    for user, found in by_user(_scored(outputs, "table3")).items():
        name, is_mixed, _ = user.partition(" on ")
        domains = ", ".join(domain.partition("-")[2] for domain in DRIFTS[name])
        line = ["" if is_mixed else domains, "B and C" if is_mixed else "B"]
        line.append(number(perplexity(found["pure"].surprise)))
        for method in methods:
            to_pure = change(found[method].surprise, found["pure"].surprise).value
            line.append(_name(method, f"{signed(to_pure, 1)} %"))
        to_random = change(found["offline"].surprise, found["random"].surprise)
        lines.append([*line, _percents(to_random)])
    heads = ["A, B, C", "tested", "pure", *(_name(name, name) for name in methods)]
    return Table([*heads, "offline to random"], lines, "llrrrrrr")


def _harm(outputs: Sequence[Output]) -> Table:
    """Show the offline datastore's mean change on other texts, by the length of the prompt."""
    found: dict[str, dict[int, list[Row]]] = {}
    for row in _scored(outputs, "harm"):
        text, n_prompt = _text_of(row)
        found.setdefault(text, {}).setdefault(n_prompt, []).append(row)
    prompts = sorted({n for by_prompt in found.values() for n in by_prompt})
    lines = [
        [
            title,
            *(
                spread(_mean(by_user(found[text][n]), "offline", "pure"), unit=" %")
                for n in prompts
            ),
        ]
        for text, title in _TEXTS.items()
        if text in found
    ]
    heads = ["", *(f"after {n}" if n else "read" for n in prompts)]
    return Table(heads, lines, "l".ljust(len(heads), "r"))


def _approximation(outputs: Sequence[Output]) -> Table:
    """Show the cost of fewer directions, beside that of skipped searches."""
    rows = _rows(outputs, "shipped")
    users = by_user(map(from_json, rows))
    searched, skipped = [], []
    for n_dims in _DIMS:
        method = f"{n_dims} dimensions"
        recall = 100 * _mean_of(rows, method, "recall")
        to_exact = _mean(users, method, "exact").value
        label = f"{n_dims} (all)" if n_dims == _DIMS[-1] else str(n_dims)
        searched.append(
            [
                f"{bold(label)} (default)" if n_dims == _DEFAULT_DIMS else label,
                f"{recall:.1f} %" if recall < 99.95 else "100 %",
                f"{signed(to_exact, 2)} %" if n_dims < _DIMS[-1] else "",
            ]
        )
    for threshold in _THRESHOLDS:
        method = f"unless MaxProb is {threshold:g}"
        saved = percent(_mean_of(rows, method, "saved"), 1)
        to_exact_ = spread(_mean(users, method, "exact"), 2, " %")
        skipped.append([f"{threshold:g}", saved, to_exact_])
    pairs = zip_longest(searched, skipped, fillvalue=["", "", ""])
    heads = ["directions", "recall@100", "perplexity to exact", "", "skipped above"]
    lines = [[*one, "", *other] for one, other in pairs]
    return Table([*heads, "searches saved", "perplexity to exact"], lines, "rrrlrrr")


def _generated(outputs: Sequence[Output]) -> Table:
    """Show the variety of generated text."""
    rows = _rows(outputs, "generated")
    is_one = len({row["user"] for row in rows}) == 1
    lines = []
    for user in dict.fromkeys(row["user"] for row in rows):
        found = {row["text"]: row for row in rows if row["user"] == user}
        for text, title in _WRITTEN.items():
            names = ("distinct_1", "distinct_2", "repeated", "copied")
            cells = [f"{found[text][name]:.1f} %" for name in names]
            lines.append([title if is_one else f"{user}: {title}", *cells])
    return Table(["", "distinct-1", "distinct-2", "repeated", "copied"], lines, "lrrrr")


TABLES: Mapping[str, Maker] = {
    "knn-users": _users,
    "knn-perplexity": _perplexities,
    "knn-means": _means,
    "knn-kept": _by_share,
    "knn-equal": _equal,
    "knn-rules": _rules,
    "knn-drift": _drift,
    "knn-harm": _harm,
    "knn-approximation": _approximation,
    "knn-generated": _generated,
}


def _rows(outputs: Sequence[Output], figure: str) -> Sequence[Mapping[str, Any]]:
    """Return the rows of an output as JSON.

    Raises:
        NoRowsError: It is of another figure.
    """
    output = only(outputs)
    if (found := output["settings"]["figure"]) != figure:
        raise NoRowsError(f"found the output of {found}, expected that of {figure}")
    rows: Sequence[Mapping[str, Any]] = output["rows"]
    return rows


def _scored(outputs: Sequence[Output], figure: str) -> list[Row]:
    return [from_json(row) for row in _rows(outputs, figure)]


# -- reports -------------------------------------------------------------------------------------


def _report_methods(document: Output) -> list[Table]:
    rows = [from_json(row) for row in document["rows"]]
    users = by_user(rows)
    changes = changes_table(rows, _measured(users, OURS), _measured(users, ("pure", *RIVALS)))
    return [_perplexities([document]), changes, _means([document])]


def _report_means(*bases: str) -> Callable[[Output], list[Table]]:
    def tables(document: Output) -> list[Table]:
        rows = [from_json(row) for row in document["rows"]]
        methods = [name for name in next(iter(by_user(rows).values())) if name != "pure"]
        return [means_table(rows, methods, bases)]

    return tables


def _report_harm(document: Output) -> list[Table]:
    rows = [from_json(row) for row in document["rows"]]
    kinds: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        kinds.setdefault(_text_of(row), []).append(row)
    return [
        _harm([document]),
        *(changes_table(some, ["random", "offline"], ["pure"]) for some in kinds.values()),
    ]


_REPORTS: Mapping[str, Callable[[Output], list[Table]]] = {
    "users": lambda document: [_users([document])],
    "table2": _report_methods,
    "table3": lambda document: [_drift([document]), *_report_means("pure")(document)],
    "fig9": lambda document: [_by_share([document]), *_report_means("pure", "full")(document)],
    "equal": lambda document: [_equal([document])],
    "harm": _report_harm,
    "ablation": _report_means("pure", "random", "offline"),
    "shipped": lambda document: [
        _approximation([document]),
        *_report_means("pure", "exact")(document),
    ],
    "generated": lambda document: [_generated([document])],
}


# -- cells ---------------------------------------------------------------------------------------


def _measured(users: By, methods: Iterable[str]) -> list[str]:
    """Return the methods that every user was measured with, in this order."""
    return [name for name in methods if all(name in found for found in users.values())]


def _name(method: str, text: str) -> str:
    """Return a text of a method's, in bold for the default one."""
    return bold(text) if method == _BOLD else text


def _text_of(row: Row) -> tuple[str, int]:
    """Return the kind of a row's text, and the length of its prompt."""
    name, _, n_prompt = row.user.partition(" after ")
    _, is_other, text = name.partition(" on ")
    return text if is_other else "own", int(n_prompt or 0)


def _kept(users: By, method: str) -> float:
    shares = [found[method].n_pairs / found[method].n_history for found in users.values()]
    return sum(shares) / len(shares)


def _mean(users: By, method: str, base: str) -> Interval:
    pairs: list[tuple[Surprise, Surprise]] = [
        (found[method].surprise, found[base].surprise) for found in users.values()
    ]
    return mean_change(pairs)


def _mean_of(rows: Sequence[Mapping[str, Any]], method: str, key: str) -> float:
    return float(np.mean([row[key] for row in rows if row["method"] == method]))


def _changed(users: By, method: str, base: str) -> str:
    return _percents(_mean(users, method, base))


def _percents(found: Interval) -> str:
    return spread(found, 1, " %")
