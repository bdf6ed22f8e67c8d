"""The paper's Tables 2 and 3 and Figs 3 and 9 on simulated users, and the suite's own tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from llmaas_eval.knn.drift import DRIFTS, drifted, head
from llmaas_eval.knn.duplicates import likeness, without_duplicates
from llmaas_eval.knn.encoder import Encoder
from llmaas_eval.knn.keys import Part, UserKeys
from llmaas_eval.knn.methods import METHODS, OURS
from llmaas_eval.knn.options import SHARE, Options
from llmaas_eval.knn.plots import draw_bars, draw_curves
from llmaas_eval.knn.product import draw_generated, draw_shipped
from llmaas_eval.knn.report import report
from llmaas_eval.knn.rows import as_json
from llmaas_eval.knn.scoring import Method, Row, ScoringSettings, history_of, study
from llmaas_eval.knn.unrelated import unrelated
from llmaas_eval.knn.users import USERS, load, split
from llmaas_eval.results import write

__all__ = ["FIGURES", "draw"]

JsonRow = Mapping[str, Any]

_PROMPTS = (16, 32, 64, 128)
_BY_ITSELF = ("online", "online, top")
"""Methods that decide how many pairs they keep."""
_SHARES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75)


class _Figure(Protocol):
    def __call__(self, options: Options, path: Path) -> Sequence[JsonRow]:
        """Measure, draw the plot if there is one, and return the rows for JSON."""


def draw(name: str, options: Options) -> str:
    """Measure and write a figure; return its tables as text."""
    path = options.out / f"knn-{name}"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = FIGURES[name](options, path)
    settings = {
        "figure": name,
        "model": options.model.name,
        "users": list(options.users),
        "n_test": options.scoring.n_test,
        "n_held": options.scoring.n_held,
    }
    return write(path, settings, rows, report)


def _users(options: Options, path: Path) -> list[JsonRow]:
    del path
    rows: list[JsonRow] = []
    for name in options.users:
        parts = split(load(options.data, name), name)
        kept = without_duplicates(parts)
        row = {
            "user": name,
            "set": USERS[name][0],
            "n_train": len(parts.train),
            "n_test": len(kept.test),
            "n_removed": len(parts.test) - len(kept.test),
            "known": float(likeness(kept).known.mean()),
        }
        rows.append(row)
    return rows


def _table2(options: Options, path: Path) -> list[JsonRow]:
    methods = {name: METHODS[name] for name in options.methods}
    rows = [row for keys in options.each() for row in _studied(keys, options.scoring, methods)]
    draw_bars(rows, path)
    return [as_json(row) for row in rows]


def _table3(options: Options, path: Path) -> list[JsonRow]:
    del path
    methods = {name: METHODS[name] for name in ("random", "full", *OURS)}
    rows = []
    for name, domains in DRIFTS.items():
        keys, mixed = drifted(*map(options.user, domains))
        settings = replace(options.scoring, n_test=len(keys.test))
        others = {"B and C mixed": mixed}
        rows += _studied(replace(keys, name=name), settings, methods, others)
    return [as_json(row) for row in rows]


def _fig9(options: Options, path: Path) -> list[JsonRow]:
    methods = {name: METHODS[name] for name in ("random", *OURS)}
    at = {f"{name} {share:g}": (methods[name], share) for share in _SHARES for name in methods}
    at = {"full": (METHODS["full"], 1.0), **at}
    rows = [row for keys in options.each() for row in study(keys, at, options.scoring)]
    draw_curves(rows, path)
    return [as_json(row) for row in rows]


def _equal(options: Options, path: Path) -> list[JsonRow]:
    """Measure all methods with as many pairs as Algorithm 2 keeps, whose shares double."""
    del path
    rows = []
    for keys in options.each():
        history, _ = history_of(keys, options.scoring)
        size = round(SHARE * len(history))
        share = len(METHODS["online"](history, size).rows) / len(history)
        at = {
            name: (METHODS[name], SHARE if name in _BY_ITSELF else share)
            for name in options.methods
            if name != "full"
        }
        rows += study(keys, at, options.scoring)
    return [as_json(row) for row in rows]


def _harm(options: Options, path: Path) -> list[JsonRow]:
    """Measure text from its beginning, and text after prompts of several lengths."""
    del path
    with Encoder(options.model) as encoder:
        others = unrelated(options.data, encoder)
    methods = {name: METHODS[name] for name in ("random", "offline")}
    rows = []
    for keys in options.each():
        stranger = options.user(_stranger(keys.name))
        others["a stranger's"] = head(stranger.test, 20)
        rows += _studied(keys, options.scoring, methods, others, (0, *_PROMPTS))
    return [as_json(row) for row in rows]


def _stranger(name: str) -> str:
    """Return a user of another kind than ``name``."""
    return "turns-travel" if not name.startswith("turns") else "topic-health"


def _ablation(options: Options, path: Path) -> list[JsonRow]:
    """Measure design choices: the kind of key, trust, leaving far states to the model, drawing."""
    del path
    methods = {name: METHODS[name] for name in ("full", "random", "offline", "offline, top")}
    variants = {
        "": options.scoring,
        ", final norm": replace(options.scoring, kind="norm"),
        ", no trust": replace(options.scoring, has_trust=False),
        ", Eq 33": replace(options.scoring, has_far=False, has_trust=False),
    }
    rows = []
    for keys in options.each():
        for name, settings in variants.items():
            found = _studied(keys, settings, methods)
            rows += [
                row._replace(method=row.method + name) for row in found if row.method != "pure"
            ]
        rows.append(found[0])
    return [as_json(row) for row in rows]


def _studied(
    keys: UserKeys,
    settings: ScoringSettings,
    methods: Mapping[str, Method],
    others: Mapping[str, Part] | None = None,
    prompts: Sequence[int] = (0,),
) -> list[Row]:
    at = {name: (method, SHARE) for name, method in methods.items()}
    return study(keys, at, settings, others=others, prompts=prompts)


FIGURES: Mapping[str, _Figure] = {
    "users": _users,
    "table2": _table2,
    "table3": _table3,
    "fig9": _fig9,
    "equal": _equal,
    "harm": _harm,
    "ablation": _ablation,
    "shipped": draw_shipped,
    "generated": draw_generated,
}
