"""Figures of tolerance-aware compression: LLMS Fig 6b and 12, bytes against quality, recall."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.data import chat_lines
from llmaas_eval.results import write
from llmaas_eval.tolerance.arms import Arm, Row, ask, go_on, layer_damage
from llmaas_eval.tolerance.engine import Engine
from llmaas_eval.tolerance.plots import draw_bars, draw_curves, draw_tasks
from llmaas_eval.tolerance.recall import Recall, make_alike, make_facts, make_recall
from llmaas_eval.tolerance.report import ALL, FINE, LOW, OWN, PAPER, report
from llmaas_eval.tolerance.texts import Tokenize, packaged_samples, samples

__all__ = ["DEFAULT_N", "FIGURES", "Options", "draw"]

_CURVE = (8.0, 6.0, 5.0, 4.0, 3.0, 2.5, 2.0, 1.5, 1.0)
_N_FACTS, _LONGEST = 6, 960
"""Number of facts in a context, and largest number of its tokens."""
_PROBES = {"facts": (make_facts, (800, 2400)), "alike": (make_alike, (1200, 2000))}
"""Functions that make each probe's facts, and the range of distraction in characters."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a figure.

    Attributes:
        data: Folder of the data sets.
        model: GGUF file.
        n_each: Number of texts of each task, or of contexts with facts.
        seed: Seed of the choice of texts and facts.
        out: Folder for the results.
    """

    data: Path
    model: Path
    n_each: int
    seed: int
    out: Path


class _Figure(Protocol):
    def __call__(self, engine: Engine, options: Options, path: Path) -> list[Row]:
        """Measure and draw a figure; return its rows."""


def draw(name: str, options: Options) -> str:
    """Measure a figure, write it, and return its text."""
    path = options.out / f"tolerance-{name}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with Engine(options.model) as engine:
        rows = FIGURES[name](engine, options, path)
    settings = {"figure": name, "model": options.model.name, "n_each": options.n_each}
    return write(path, settings | {"seed": options.seed}, rows, report)


def _fig6b(engine: Engine, options: Options, path: Path) -> list[Row]:
    texts = samples(options.data, engine.tokens, options.n_each, ["wikitext"], options.seed)
    arms = [Arm("int8"), Arm("ours", 4, PAPER), Arm("ours", 4, OWN), Arm("static", 4)]
    rows = go_on(engine, list(texts), arms)
    draw_bars(rows, path)
    return rows


def _fig12(engine: Engine, options: Options, path: Path) -> list[Row]:
    texts = samples(options.data, engine.tokens, options.n_each, seed=options.seed)
    arms = [Arm("int8"), Arm("static", 4), Arm("static", 2)]
    for mean, levels in ((4.0, PAPER), (4.0, OWN), (2.0, LOW)):
        arms += [Arm(name, mean, levels) for name in ("ours", "recency", "random", "layers")]
        if len(levels) == len(PAPER):
            arms += [Arm(name, mean, levels) for name in ("linear", "as printed")]
    damage = _damage(engine)
    rows = go_on(engine, list(texts), arms, damage)
    static = [("static", 4.0), ("static", 2.0)]
    ours = [(arm.name, arm.mean) for arm in arms if arm.rival == "ours"]
    draw_tasks(rows, [static[0], *ours[:2], static[1], ours[2]], path)
    return rows


def _curve(engine: Engine, options: Options, path: Path) -> list[Row]:
    texts = samples(options.data, engine.tokens, options.n_each, seed=options.seed)
    arms = [
        Arm(name, mean, levels)
        for mean in _CURVE
        for name, levels in (
            ("static", ()),
            ("ours", ALL),
            ("recency", ALL),
            ("random", ALL),
            ("layers", ALL),
        )
    ]
    damage = _damage(engine)
    rows = go_on(engine, list(texts), arms, damage)
    draw_curves({"": rows}, "kl", path)
    return rows


def _damage(engine: Engine) -> NDArray[np.float64]:
    return layer_damage(engine, list(packaged_samples(engine.tokens))[::3])


def _recall(engine: Engine, options: Options, path: Path) -> list[Row]:
    arms = [Arm("int8")]
    for mean in (4.0, 3.0, 2.5, 2.0, 1.5, 1.0):
        arms.append(Arm("static", mean))
        arms += [Arm(name, mean, ALL) for name in ("ours", "random")]
    for mean, levels in ((4.0, PAPER), (4.0, OWN), (2.5, FINE), (2.0, LOW)):
        arms += [Arm(name, mean, levels) for name in ("ours", "random", "layers")]
    damage = _damage(engine)
    probes = {
        name: [
            row | {"task": name}
            for row in ask(engine, _recalls(name, engine.tokens, options), arms, damage)
        ]
        for name in _PROBES
    }
    lines = {arm.name for arm in arms if arm.levels in {(), ALL}}
    panels = {name: [row for row in rows if row["arm"] in lines] for name, rows in probes.items()}
    draw_curves(panels, "right", path)
    return [row for rows in probes.values() for row in rows]


def _recalls(probe: str, tokenize: Tokenize, options: Options) -> list[Recall]:
    make, characters = _PROBES[probe]
    chats = chat_lines(options.data, "sgd_dev")
    random = Random(f"{probe} {options.seed}")  # noqa: S311 - texts, no secret
    found: list[Recall] = []
    while len(found) < options.n_each:
        facts = make(random, _N_FACTS)
        recall = make_recall(random, chats, facts, random.randrange(*characters))
        if len(tokenize(recall.context)) <= _LONGEST:
            found.append(recall)
    return found


FIGURES: Mapping[str, _Figure] = {
    "fig6b": _fig6b,
    "fig12": _fig12,
    "curve": _curve,
    "recall": _recall,
}
DEFAULT_N: Mapping[str, int] = {"fig6b": 40, "fig12": 40, "curve": 6, "recall": 30}
