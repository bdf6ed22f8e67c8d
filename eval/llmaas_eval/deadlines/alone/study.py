"""The study: each method's answers under each promise, as rows of its output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from llmaas_eval.deadlines.alone.answering import OURS, SEPARATE, WHOLE, Asked, ByMethod
from llmaas_eval.deadlines.alone.choosing import Judge, Judged
from llmaas_eval.deadlines.alone.promises import APART, Promise, Times, feasible, times_of, widest
from llmaas_eval.deadlines.loaded.scoring import Pair
from llmaas_plugins.elastic.latency import Latency

__all__ = ["BEST", "ONE_LEVEL", "RANDOM", "WIDEST", "Row", "rows_of", "values_of"]

WIDEST, ONE_LEVEL = "ours, widest", "ours, one level"
RANDOM, BEST = "ours, random setting", "ours, best for each question"
_DIGITS = 4

Row = Mapping[str, Any]


def rows_of(
    of: Asked, found: Mapping[str, ByMethod], latency: Latency, promises: Sequence[Promise]
) -> Iterator[Row]:
    """Yield a row for each set, and for each of its promises and methods.

    A row has the values of each question. It has none if the method cannot keep the promise.

    Args:
        of: Model and its questions.
        found: Answers by set.
        latency: Measured times of the levels.
        promises: Promises to keep.
    """
    for name, items in of.sets.items():
        whole = found[name][OURS][WHOLE]
        judge = Judge(whole, [item.choice for item in items])
        about = {"model": of.name, "set": name}
        yield {"row": "whole", **about, **values_of(judge.of(whole, [WHOLE]))}
        for pair, scores in found[name][OURS].items():
            one = judge.of(scores, [pair])
            means = {key: float(getattr(one, key).mean()) for key in ("agrees", "right", "nats")}
            yield {"row": "setting", **about, "levels": _levels(latency, pair), **means}
        times = times_of(latency, [len(item.prompt) for item in items])
        for promise in promises:
            for by, judged in _arms(found[name], judge, times, promise):
                row = {"row": "promise", **about, **promise._asdict(), "by": by}
                row["has_all_settings"] = of.settings is None
                levels = [_levels(latency, pair) for pair in judged.settings] if judged else []
                yield {**row, "levels": levels, **(values_of(judged) if judged else {})}


def values_of(judged: Judged) -> dict[str, list[float]]:
    """Return the values of each question, rounded, so that the output is short."""
    names = ("agrees", "right", "nats")
    return {name: np.round(getattr(judged, name), _DIGITS).tolist() for name in names}


# -- inside --------------------------------------------------------------------------------------


def _arms(
    found: ByMethod, judge: Judge, times: Times, promise: Promise
) -> Iterator[tuple[str, Judged | None]]:
    """Yield each method and what it answers under a promise; None if it cannot keep it."""
    ours = found[OURS]
    possible = feasible(promise, times, [*ours])
    yield OURS, judge.chosen(ours, possible)
    if promise.kind == APART:
        pair = widest(possible)
        yield WIDEST, judge.of(ours[pair], [pair, pair]) if pair else None
    yield ONE_LEVEL, judge.chosen(ours, [pair for pair in possible if pair[0] == pair[1]])
    separate = [pair for pair in possible if pair in SEPARATE]
    yield RANDOM, judge.random(ours, separate)
    yield BEST, judge.best(ours, separate)
    for method, theirs in found.items():
        if method != OURS:
            yield method, judge.chosen(theirs, feasible(promise, times, [*theirs]))


def _levels(latency: Latency, pair: Pair) -> list[float]:
    return [latency.levels[i] for i in pair]
