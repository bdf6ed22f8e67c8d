"""The study: which probes it needs, and the rows of its output."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmaas_eval.deadlines.loaded.bench import Bench, opened, replace_json
from llmaas_eval.deadlines.loaded.goodput import highest, rate_of, step_of
from llmaas_eval.deadlines.loaded.probes import Case, Probe, Probes
from llmaas_eval.deadlines.loaded.questions import AppQuestions
from llmaas_eval.deadlines.loaded.shorter import UNTRAINED, trained_encoder
from llmaas_eval.deadlines.loaded.systems import HALF_OF, SYSTEMS, Kind
from llmaas_eval.deadlines.loaded.traces import APP_NAMES

__all__ = [
    "ENOUGH",
    "MODELS",
    "PACKAGED",
    "PARTS",
    "TUNED",
    "Plan",
    "Row",
    "check_folder",
    "run",
    "summary",
]

PARTS = ("goodput", "half", "rates", "answers")
MODELS = PACKAGED, TUNED = "packaged", "tuned"
"""Models that answer: the packaged one, and a copy of it that is tuned to tasks."""
ENOUGH, _HALF = 0.9, 0.5
"""Shares of requests that keep both limits: for goodput, and for the rate of part ``half``."""
_BELOW, _ABOVE = 24, 12
"""Steps to search below and above the rate that the whole model can serve: a tenth to threefold."""
_N_ANSWER = 24
_SLACK = 0.05
"""A system is searched if its levels could keep this much less than enough, on an idle machine."""

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """Systems, traces and rates to measure.

    Attributes:
        parts: Some of ``PARTS``.
        systems: Names of systems.
        kinds: Kinds of prompts.
        alphas: Mixes of apps.
        rates: Rates of part ``rates``, in requests a second.
        n_requests: Requests of a trace.
        seed: Seed of the traces.
        n_idle: Requests of each app and kind that are measured on an idle service.
        shape: Shape of the random model.
        models: Models that answer.
        n_tuned: Tokens to tune a copy of the packaged model on.
        data: Folder of the data sets that the copy is tuned to; None for generated requests.
        scratch: Folder of models that were trained from scratch; None for none.
    """

    parts: Sequence[str]
    systems: Sequence[str]
    kinds: Sequence[Kind]
    alphas: Sequence[float]
    rates: Sequence[float]
    n_requests: int
    seed: int
    n_idle: int
    shape: str
    models: Sequence[str]
    n_tuned: int
    data: Path | None
    scratch: Path | None


def check_folder(folder: Path, plan: Plan, texts: str) -> None:
    """Refuse a folder whose results belong to other traces or another model.

    Raises:
        OSError: The folder cannot be written.
        ValueError: It has results of other settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "settings.json"
    ours = {
        "requests": plan.n_requests,
        "seed": plan.seed,
        "idle": plan.n_idle,
        "shape": plan.shape,
        "texts": texts,
    }
    if not path.exists():
        replace_json(path, ours)
        return
    found = json.loads(path.read_text("utf-8"))
    if found != ours:
        raise ValueError(f"{folder} has results of {found}, expected {ours}; give another --out")


def run(plan: Plan, apps: Mapping[str, AppQuestions], folder: Path) -> list[Row]:
    """Measure what is missing; return the rows of everything that the folder has.

    Raises:
        OSError: The folder cannot be written.
        RuntimeError: A service does not start, or fails to answer.
        ValueError: A system cannot be measured.
    """
    for name in plan.systems:
        if SYSTEMS[name].shortens and trained_encoder() is None:
            raise ValueError(f"{name} cannot be measured: {UNTRAINED}")
    bench = opened(folder, apps, plan.n_idle, plan.shape)
    probes = Probes(bench, folder / "probes", plan.n_requests, plan.seed)
    rows: list[Row] = []
    if "goodput" in plan.parts:
        rows += [_goodput(probes, bench, case) for case in _cases(plan)]
    if "half" in plan.parts:
        rows += _halves(plan, probes, bench)
    if "rates" in plan.parts:
        for case in _cases(plan):
            for rate in plan.rates:
                probes.probe(case, step_of(rate))
    done = [one for one in probes.done() if one.case in set(_cases(plan))]
    rows += [summary(one) for one in done]
    if "answers" in plan.parts:
        from llmaas_eval.deadlines.loaded.answered import answered  # needs torch

        rows += answered(plan, apps, probes, done, folder)
    return rows


def summary(probe: Probe) -> Row:
    """Return the counts of a probe by app."""
    apps = {}
    for app in APP_NAMES:
        some = [one for one in probe.served if one.app == app]
        levels = [
            statistics.median(pair) for pair in zip(*(one.levels for one in some), strict=True)
        ]
        apps[app] = {
            "n": len(some),
            "ttft": sum(one.has_ttft for one in some),
            "tpot": sum(one.has_tpot for one in some),
            "both": sum(one.is_met for one in some),
            "flagged": sum(bool(one.infeasible) for one in some),
            "silent": sum(one.has_silent_miss for one in some),
            "failed": sum(one.error is not None for one in some),
            "levels": levels,
            "shortened": sum(one.share < 1 for one in some),
            "read": statistics.mean(one.share for one in some) if some else None,
        }
    return {"row": "probe", **probe.case._asdict(), "rate": probe.rate, "apps": apps}


# -- inside --------------------------------------------------------------------------------------


def _cases(plan: Plan) -> Iterator[Case]:
    for alpha in plan.alphas:
        for kind in plan.kinds:
            for system in plan.systems:
                yield Case(system, kind, alpha)


def _goodput(probes: Probes, bench: Bench, case: Case) -> Row:
    """Search a case's goodput, unless even an idle machine could not keep enough promises."""
    possible, step = probes.possible_share(case), None
    if possible >= ENOUGH - _SLACK:
        step = _search(probes, bench, case, ENOUGH)
    rate = None if step is None else rate_of(step)
    return {"row": "goodput", **case._asdict(), "rate": rate, "possible": possible}


def _halves(plan: Plan, probes: Probes, bench: Bench) -> Iterator[Row]:
    """Serve all systems at the highest rate at which ``HALF_OF`` meets half of the requests."""
    for alpha in plan.alphas:
        for kind in plan.kinds:
            step = _search(probes, bench, Case(HALF_OF, kind, alpha), _HALF)
            if step is not None:
                for system in plan.systems:
                    probes.probe(Case(system, kind, alpha), step)
            rate = None if step is None else rate_of(step)
            yield {"row": "half", "kind": kind, "alpha": alpha, "rate": rate}


def _search(probes: Probes, bench: Bench, case: Case, share: float) -> int | None:
    start = step_of(_capacity(bench, case.kind))
    return highest(
        lambda step: probes.probe(case, step, share).passes(share),
        start,
        start - _BELOW,
        start + _ABOVE,
    )


def _capacity(bench: Bench, kind: str) -> float:
    """Return about how many requests a second the whole model serves."""
    whole, seconds = bench.times.latency.levels[0], []
    for app in APP_NAMES:
        size = bench.size(app, 0)
        further = _N_ANSWER * bench.times.tpot_ms(whole, size)
        seconds.append((bench.times.ttft_ms(whole, size, kind) + further) / 1000)
    return 1 / statistics.mean(seconds)
