"""Tables and figures of the paper on simulated users: Tables 2 and 3, Figs 3 and 9, and no harm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from llmaas_eval.knn import report
from llmaas_eval.knn.drift import DRIFTS, drifted, head
from llmaas_eval.knn.duplicates import likeness, without_duplicates
from llmaas_eval.knn.encoder import Encoder
from llmaas_eval.knn.intervals import Surprise
from llmaas_eval.knn.keys import Part, UserKeys, kept_keys
from llmaas_eval.knn.methods import METHODS, OURS, RIVALS
from llmaas_eval.knn.pictures import draw_bars, draw_curves
from llmaas_eval.knn.shipped import DIMS, exactly, shipped
from llmaas_eval.knn.study import Chosen, Method, Plan, Row, first, history_of, study
from llmaas_eval.knn.unrelated import unrelated
from llmaas_eval.knn.users import USERS, load, split
from llmaas_plugins.knn_lm.fitting import fit
from llmaas_plugins.knn_lm.pairs import Pairs

__all__ = ["FIGURES", "Options", "draw"]

SHARE = 0.3
"""L over the pairs of the history: the paper's 1e5 of 2.5e5 to 4e5."""
_HISTORY = 0.9
"""Of the training part; settings are fitted on the rest."""
_SHARES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75)
_THRESHOLDS = (0.99, 0.95, 0.9, 0.8, 0.7, 0.5)


@dataclass(frozen=True, slots=True)
class Options:
    """Of a figure.

    Attributes:
        data: Folder of the data sets.
        model: GGUF.
        cache: Folder where users' pairs are kept.
        users: Whose.
        plan: How they are studied.
        out: Folder for the results.
    """

    data: Path
    model: Path
    cache: Path
    users: Sequence[str]
    plan: Plan
    out: Path

    def each(self) -> Iterator[UserKeys]:
        """Each user's pairs."""
        for name in self.users:
            yield self.user(name)

    def user(self, name: str) -> UserKeys:
        """A user's pairs."""
        return kept_keys(self.cache, self.data, self.model, name)


class _Figure(Protocol):
    def __call__(self, options: Options, path: Path) -> tuple[list[Row], str]:
        """Measure, draw, and give the rows and the text."""


def draw(name: str, options: Options) -> str:
    """Measure and write a figure; its text."""
    path = options.out / f"knn-{name}"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows, text = FIGURES[name](options, path)
    settings = {
        "figure": name,
        "model": options.model.name,
        "users": list(options.users),
        "n_test": options.plan.n_test,
        "n_held": options.plan.n_held,
    }
    report.write(path, settings, rows, text)
    return text


def _users(options: Options, path: Path) -> tuple[list[Row], str]:
    del path
    lines = []
    for name in options.users:
        parts = split(load(options.data, name), name)
        kept = without_duplicates(parts)
        known = likeness(kept).known.mean()
        removed = len(parts.test) - len(kept.test)
        cells = [len(parts.train), len(kept.test), removed, f"{known:.0%}"]
        lines.append([f"{name} ({USERS[name][0]})", *map(str, cells)])
    heads = ["user (set)", "training", "test", "removed", "known"]
    return [], report.table(heads, lines)


def _table2(options: Options, path: Path) -> tuple[list[Row], str]:
    rows = [row for keys in options.each() for row in _studied(keys, options.plan, METHODS)]
    draw_bars(rows, path)
    tables = [
        report.users_table(rows),
        report.changes_table(rows, OURS, RIVALS),
        report.means_table(rows, ["pure", "random", "full"]),
    ]
    return rows, "\n\n".join(tables)


def _table3(options: Options, path: Path) -> tuple[list[Row], str]:
    del path
    methods = {name: METHODS[name] for name in ("random", "full", *OURS)}
    rows = []
    for name, domains in DRIFTS.items():
        keys, mixed = drifted(*map(options.user, domains))
        plan = replace(options.plan, n_test=len(keys.test))
        others = {"B and C mixed": mixed}
        rows += _studied(replace(keys, name=name), plan, methods, others)
    return rows, "\n\n".join([report.users_table(rows), report.means_table(rows, ["pure"])])


def _fig9(options: Options, path: Path) -> tuple[list[Row], str]:
    methods = {name: METHODS[name] for name in ("random", *OURS)}
    rows: list[Row] = []
    for keys in options.each():
        n = _HISTORY * len(keys.train)
        at = {
            f"{name} {share:g}": (methods[name], round(share * n))
            for share in _SHARES
            for name in methods
        }
        rows += study(keys, {"full": (METHODS["full"], 0), **at}, options.plan)
    draw_curves(rows, path)
    return rows, report.means_table(rows, ["pure", "full"])


def _harm(options: Options, path: Path) -> tuple[list[Row], str]:
    del path
    with Encoder(options.model) as encoder:
        others = unrelated(options.data, encoder)
    methods = {name: METHODS[name] for name in ("random", "offline")}
    rows = []
    for keys in options.each():
        stranger = options.user(_stranger(keys.name))
        others["a stranger's"] = head(stranger.test, 20)
        rows += _studied(keys, options.plan, methods, others)
    names = [None, *others]
    tables = [
        f"{name or 'own'}:\n\n"
        + report.changes_table([row for row in rows if _text(row) == name], list(methods), ["pure"])
        for name in names
    ]
    return rows, "\n\n".join(tables)


def _stranger(name: str) -> str:
    """Another kind of user."""
    return "turns-travel" if not name.startswith("turns") else "topic-health"


def _text(row: Row) -> str | None:
    _, found, name = row.user.partition(" on ")
    return name if found else None


def _ablation(options: Options, path: Path) -> tuple[list[Row], str]:
    """What each choice is worth: the kind of key, leaving far states to the model, drawing."""
    del path
    methods = {name: METHODS[name] for name in ("full", "random", "offline", "offline, top")}
    plans = {
        "": options.plan,
        ", final norm": replace(options.plan, kind="norm"),
        ", Eq 33": replace(options.plan, has_far=False),
    }
    rows = []
    for keys in options.each():
        for name, plan in plans.items():
            found = _studied(keys, plan, methods)
            rows += [
                row._replace(method=row.method + name) for row in found if row.method != "pure"
            ]
        rows.append(found[0])
    return rows, report.means_table(rows, ["pure", "random", "offline"])


def _shipped(options: Options, path: Path) -> tuple[list[Row], str]:
    """Of the offline subset: neighbours found exactly, by the datastore, and not looked for."""
    del path
    recalls: dict[str, list[float]] = {}
    skipped: dict[str, list[float]] = {}
    rows = []
    for keys in options.each():
        history, fitted_on = history_of(keys, options.plan)
        chosen, part = _offline(history), first(keys.test, options.plan.n_test)
        k = options.plan.k
        mixture = fit(exactly(history, chosen, fitted_on, k).met).mixture
        exact = exactly(history, chosen, part, k)
        alone, n = Surprise.of(part.p, part.conv), len(history)
        rows.append(Row(keys.name, "pure", n, 0, None, alone))
        row = Row(keys.name, "exact", n, len(chosen.rows), mixture, exact.surprise(mixture, part))
        rows.append(row)
        for n_dims in DIMS:
            name, found = f"{n_dims} dimensions", shipped(history, chosen, part, k, n_dims)
            recalls.setdefault(name, []).append(found.recall(exact))
            rows.append(row._replace(method=name, surprise=found.surprise(mixture, part)))
        for threshold in _THRESHOLDS:
            name = f"unless MaxProb is {threshold:g}"
            skipped.setdefault(name, []).append(float((part.max >= threshold).mean()))
            surprise = exact.surprise(mixture, part, threshold)
            rows.append(row._replace(method=name, surprise=surprise))
    tables = [
        report.means_table(rows, ["pure", "exact"]),
        _shares_table("recall@100", recalls),
        _shares_table("searches saved", skipped),
    ]
    return rows, "\n\n".join(tables)


def _shares_table(head: str, shares: Mapping[str, Sequence[float]]) -> str:
    lines = [[name, f"{np.mean(of):.2%}"] for name, of in shares.items()]
    return report.table(["", head], lines)


def _offline(history: Pairs) -> Chosen:
    return METHODS["offline"](history, round(SHARE * len(history)))


def _studied(
    keys: UserKeys,
    plan: Plan,
    methods: Mapping[str, Method],
    others: Mapping[str, Part] | None = None,
) -> list[Row]:
    n = round(SHARE * _HISTORY * len(keys.train))
    return study(keys, {name: (method, n) for name, method in methods.items()}, plan, others=others)


FIGURES: Mapping[str, _Figure] = {
    "users": _users,
    "table2": _table2,
    "table3": _table3,
    "fig9": _fig9,
    "harm": _harm,
    "ablation": _ablation,
    "shipped": _shipped,
}
