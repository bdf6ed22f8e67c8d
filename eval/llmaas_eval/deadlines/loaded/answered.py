"""Quality of the probes' requests by the answers of two models and of narrowed ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmaas_eval.deadlines.loaded.answers import Kept, app_items, task_items, tokenizer
from llmaas_eval.deadlines.loaded.baselines import BASELINES, SCRATCH, narrowed
from llmaas_eval.deadlines.loaded.probes import Probe, Probes
from llmaas_eval.deadlines.loaded.quality import (
    WHOLE,
    AppScores,
    Setting,
    outcomes,
    setting_of,
)
from llmaas_eval.deadlines.loaded.questions import TASK_OF, AppQuestions
from llmaas_eval.deadlines.loaded.scoring import Item, Pair, Scores, Wanted, scores
from llmaas_eval.deadlines.loaded.shorter import Shorter, trained_encoder
from llmaas_eval.deadlines.loaded.study import PACKAGED, TUNED, Plan, Row
from llmaas_eval.deadlines.loaded.systems import COMPRESSED, KINDS
from llmaas_eval.deadlines.loaded.traces import ALPHAS, APP_NAMES, SHARES
from llmaas_eval.elastic.engine import Variant
from llmaas_eval.elastic.prepared import default_variant, prepared
from llmaas_eval.scratch.shapes import trained
from llmaas_eval.tasks.questions import Task, generated_tasks, read_tasks
from llmaas_plugins.elastic.uniform import LEVELS
from llmaas_plugins.reference_model import reference_model_path

__all__ = ["answered"]

_ONE_LEVEL = "fifo-one-level"
"""System that serves the narrowed models of other papers."""
_ONLY = (0, 0)
"""Pair of levels of a model that has one."""
_N_HELD_OUT, _N_GENERATED = 512, 42


def answered(
    plan: Plan,
    apps: Mapping[str, AppQuestions],
    probes: Probes,
    done: Sequence[Probe],
    folder: Path,
) -> Iterator[Row]:
    """Yield the quality of each probe, by model; make and keep the answers that are missing.

    Raises:
        OSError: A set of the tuned copy cannot be read.
        RuntimeError: A model cannot be prepared.
    """
    kept, encoder = Kept(folder / "answers"), trained_encoder()
    asked = {app: _asked(probes, app) for app in APP_NAMES}
    for name, model, items, scratch in _models(plan, apps, asked, folder):
        for kind in KINDS:
            some = [probe for probe in done if probe.case.kind == kind]
            shorter = None if encoder is None else Shorter(encoder, model, kind)
            of = _Answering(name, model, items, asked, scratch, folder / "models", kept, shorter)
            if some:
                yield from _of_kind(of, some, is_quick=plan.shape == "tiny")


# -- inside --------------------------------------------------------------------------------------


_Settings = Mapping[str, Mapping[Setting, set[int]]]
"""Questions by app and setting."""


@dataclass(frozen=True, slots=True)
class _Answering:
    """A model that answers, its questions by app, and folders for models and for answers.

    An app's questions that are ``asked`` take turns in the questions that stand for them. The
    smaller models that were trained from scratch in the model's place are in ``scratch``, by share.
    Without ``shorter``, no prompt can be shortened.
    """

    name: str
    model: Path
    items: Mapping[str, Sequence[Item]]
    asked: Mapping[str, Sequence[int]]
    scratch: Mapping[float, Path]
    folder: Path
    kept: Kept
    shorter: Shorter | None

    def set_of(self, app: str) -> str:
        """Return the name of the questions that stand for an app's."""
        return f"{self.model.stem}-{TASK_OF[app] if self.name == TUNED else app}"

    def rows_of(self, app: str) -> dict[int, int]:
        """Return the place among the questions that stand for an app's, by question."""
        n = len(self.items[app])
        return {question: i % n for i, question in enumerate(self.asked[app])}

    def scores(
        self, name: str, app: str, variant: Callable[[], Variant], wanted: Wanted
    ) -> dict[Pair, Scores]:
        """Answer with a variant's levels, or read earlier answers."""
        return self.kept.variant_scores(name, variant, self.items[app], wanted)

    def shorter_scores(
        self, app: str, variant: Variant, share: float, wanted: Wanted
    ) -> dict[Pair, Scores]:
        """Answer with a variant's levels after a share of each prompt, or read earlier answers."""
        shorter, items = self.shorter, self.items[app]
        assert shorter is not None  # the study began with an encoder
        name = f"{self.set_of(app)}-{shorter.name}-{share:g}"

        def ask(missing: Wanted) -> dict[Pair, Scores]:
            rows = {i for some in missing.values() for i in some}
            return scores(variant, shorter.items(items, rows, share), missing, name)

        return self.kept.scores(name, len(items), wanted, ask)


def _asked(probes: Probes, app: str) -> list[int]:
    """Return the app's questions that any of the mixes asks."""
    arrivals = [one for alpha in ALPHAS for one in probes.arrivals(alpha)]
    return sorted({one.question for one in arrivals if one.app == app})


def _models(
    plan: Plan, apps: Mapping[str, AppQuestions], asked: Mapping[str, Sequence[int]], folder: Path
) -> Iterator[tuple[str, Path, Mapping[str, Sequence[Item]], Mapping[float, Path]]]:
    """Yield each model's name, file, questions by app, and models trained from scratch."""
    packaged = reference_model_path()
    scratch = {} if plan.scratch is None else trained(plan.scratch)
    if PACKAGED in plan.models:
        with tokenizer(packaged) as llama:
            items = {app: app_items(apps[app], asked[app], llama) for app in APP_NAMES}
        yield PACKAGED, packaged, items, scratch
    if TUNED in plan.models:
        from llmaas_eval.tasks.tuning import tune

        tasks, models = _tasks(plan), folder / "models"
        tuned = tune(packaged, tasks, plan.n_tuned, models, plan.seed)
        scratch = {
            share: tune(path, tasks, plan.n_tuned, models, plan.seed)
            for share, path in scratch.items()
        }
        with tokenizer(tuned) as llama:
            by_task = {name: task_items(task, llama) for name, task in tasks.items()}
        yield TUNED, tuned, {app: by_task[TASK_OF[app]] for app in APP_NAMES}, scratch


def _tasks(plan: Plan) -> Mapping[str, Task]:
    if plan.data is not None:
        return read_tasks(plan.data, _N_HELD_OUT, plan.seed)
    (task,) = generated_tasks(_N_GENERATED, plan.seed).values()
    return dict.fromkeys(TASK_OF.values(), task)


def _of_kind(of: _Answering, done: Sequence[Probe], *, is_quick: bool) -> Iterator[Row]:
    """Yield the quality of probes of a kind, and of other papers' models in place of ours."""
    ones = [probe for probe in done if probe.case.system == _ONE_LEVEL]
    ours = _ours(of, _settings(of, done), is_quick=is_quick)
    yield from (_row(of.name, probe, probe.case.system, ours) for probe in done)
    settings = _settings(of, ones)
    for method in BASELINES if ones else ():
        if method != SCRATCH or of.scratch:
            theirs = _theirs(of, method, ours, settings)
            yield from (_row(of.name, probe, method, theirs) for probe in ones)
    if ones and of.shorter is not None:
        theirs = _compressed(of, of.shorter, ours, settings)
        yield from (_row(of.name, probe, COMPRESSED, theirs) for probe in ones)


def _settings(of: _Answering, done: Sequence[Probe]) -> _Settings:
    """Return the settings that each app's requests used, and the places of their questions."""
    found: dict[str, dict[Setting, set[int]]] = {app: {} for app in APP_NAMES}
    rows = {app: of.rows_of(app) for app in APP_NAMES}
    for probe in done:
        for one in probe.served:
            setting = setting_of(LEVELS, one)
            found[one.app].setdefault(setting, set()).add(rows[one.app][one.question])
    return found


def _ours(of: _Answering, settings: _Settings, *, is_quick: bool) -> dict[str, AppScores]:
    """Answer with levels of the model that ``llmaas elastic prepare`` writes."""
    variant = default_variant(prepared(of.model, of.folder, is_quick=is_quick), LEVELS)
    found: dict[str, AppScores] = {}
    for app, items in of.items.items():
        rows = of.rows_of(app)
        used = {**settings[app], WHOLE: {*rows.values()}}
        by_setting = dict[Setting, Scores]()
        for share in {setting.share for setting in used}:
            wanted = {setting[1:]: some for setting, some in used.items() if setting.share == share}
            by_pair = (
                of.scores(of.set_of(app), app, lambda: variant, wanted)
                if share == 1
                else of.shorter_scores(app, variant, share, wanted)
            )
            by_setting |= {Setting(share, *pair): each for pair, each in by_pair.items()}
        right = [item.choice for item in items]
        found[app] = AppScores(by_setting, LEVELS, rows, by_setting[WHOLE], right)
    return found


def _theirs(
    of: _Answering, method: str, ours: Mapping[str, AppScores], settings: _Settings
) -> dict[str, AppScores]:
    """Answer with the narrowed models of another paper, which have one level for everything."""
    used = {WHOLE.prefill} | {each.prefill for some in settings.values() for each in some}
    levels = [LEVELS[i] for i in sorted(used)]
    found: dict[str, dict[Setting, Scores]] = {app: {} for app in APP_NAMES}
    for one in narrowed(method, of.model, levels, of.folder, of.scratch):
        places = {LEVELS.index(share): i for share, i in one.places.items()}
        variant = functools.cache(one.make)
        for app in APP_NAMES:
            own = {each: places[each.prefill] for each in settings[app] if each.prefill in places}
            wanted = dict[Pair, set[int]]()
            for each, at in own.items():
                wanted.setdefault((at, at), set()).update(settings[app][each])
            name = f"{of.set_of(app)}-{method}-{one.label}"
            by_pair = of.scores(name, app, variant, wanted)
            found[app] |= {each: by_pair[at, at] for each, at in own.items()}
    return {app: ours[app]._replace(by_setting=by) for app, by in found.items()}


def _compressed(
    of: _Answering, shorter: Shorter, ours: Mapping[str, AppScores], settings: _Settings
) -> dict[str, AppScores]:
    """Answer shortened prompts with a part of the neurons: both are the promise's shares."""
    found = dict[str, AppScores]()
    for app in APP_NAMES:
        rows = {row for some in settings[app].values() for row in some}
        is_whole = SHARES[app].ttft == SHARES[app].tpot == 1
        answers = ours[app].whole if is_whole else _sparse(of, shorter, app, rows)
        found[app] = ours[app]._replace(by_setting=dict.fromkeys(settings[app], answers))
    return found


def _sparse(of: _Answering, shorter: Shorter, app: str, rows: set[int]) -> Scores:
    from llmaas_eval.deadlines.loaded.contextual import SparseNeurons, sparse_scores

    items, shares = of.items[app], SHARES[app]
    name = f"{of.set_of(app)}-{COMPRESSED}-{shorter.name}-{shares.ttft:g}-{shares.tpot:g}"

    def ask(missing: Wanted) -> dict[Pair, Scores]:
        some = missing[_ONLY]
        short = shorter.items(items, some, shares.ttft)
        return {_ONLY: sparse_scores(SparseNeurons(of.model, shares.tpot), short, some, name)}

    return of.kept.scores(name, len(items), {_ONLY: rows}, ask)[_ONLY]


def _row(model: str, probe: Probe, method: str, apps: Mapping[str, AppScores]) -> Row:
    found: list[dict[str, Any]] = outcomes(probe, apps)
    columns = {key: [one[key] for one in found] for key in ("is_met", "agrees", "right", "nats")}
    case = probe.case._asdict()
    return {"row": "quality", **case, "rate": probe.rate, "model": model, "by": method, **columns}
