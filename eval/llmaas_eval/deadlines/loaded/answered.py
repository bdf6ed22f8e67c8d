"""Quality of the probes' requests by the answers of two models and of narrowed ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmaas_eval.data import packaged_documents
from llmaas_eval.deadlines.loaded.answers import Kept, app_items, task_items, tokenizer
from llmaas_eval.deadlines.loaded.baselines import BASELINES, SCRATCH, Source
from llmaas_eval.deadlines.loaded.probes import Probe, Probes
from llmaas_eval.deadlines.loaded.quality import AppScores, outcomes, pair_of
from llmaas_eval.deadlines.loaded.questions import TASK_OF, AppQuestions
from llmaas_eval.deadlines.loaded.scoring import Item, Pair, Scores
from llmaas_eval.deadlines.loaded.study import Plan, Row
from llmaas_eval.deadlines.loaded.traces import ALPHAS, APP_NAMES
from llmaas_eval.elastic.prepared import default_variant, prepared
from llmaas_eval.elastic.texts import windows_of
from llmaas_eval.scratch.shapes import trained
from llmaas_eval.tasks.questions import Task, generated_tasks, read_tasks
from llmaas_eval.weights import f16_copy
from llmaas_plugins.elastic.uniform import LEVELS
from llmaas_plugins.reference_model import reference_model_path

__all__ = ["answered"]

_ONE_LEVEL = "fifo-one-level"
"""System that serves the narrowed models of other papers."""
_TUNED = "tuned"
_WHOLE = (0, 0)
_N_HELD_OUT, _N_GENERATED = 512, 42
_N_WINDOWS, _N_TOKENS = 16, 512


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
    kept = Kept(folder / "answers")
    asked = {app: _asked(probes, app) for app in APP_NAMES}
    ones = [probe for probe in done if probe.case.system == _ONE_LEVEL]
    for name, model, items, scratch in _models(plan, apps, asked, folder):
        answering = _Answering(name, model, items, scratch, folder / "models", kept)
        ours = _ours(answering, asked, _pairs(done), is_quick=plan.shape == "tiny")
        yield from (_row(name, probe, probe.case.system, ours) for probe in done)
        for method in BASELINES if ones else ():
            if method == SCRATCH and not scratch:
                continue
            theirs = _theirs(answering, method, ours, _pairs(ones))
            yield from (_row(name, probe, method, theirs) for probe in ones)


# -- inside --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Answering:
    """A model that answers, its questions by app, and folders for models and for answers.

    The smaller models that were trained from scratch in its place are in ``scratch``, by share.
    """

    name: str
    model: Path
    items: Mapping[str, Sequence[Item]]
    scratch: Mapping[float, Path]
    folder: Path
    kept: Kept

    def set_of(self, app: str) -> str:
        """Return the name of the questions that stand for an app's."""
        return f"{self.model.stem}-{TASK_OF[app] if self.name == _TUNED else app}"


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
    with tokenizer(packaged) as llama:
        yield (
            "packaged",
            packaged,
            {app: app_items(apps[app], asked[app], llama) for app in APP_NAMES},
            scratch,
        )
    if plan.n_tuned:
        from llmaas_eval.tasks.tuning import tune

        tasks, models = _tasks(plan), folder / "models"
        tuned = tune(packaged, tasks, plan.n_tuned, models, plan.seed)
        scratch = {
            share: tune(path, tasks, plan.n_tuned, models, plan.seed)
            for share, path in scratch.items()
        }
        with tokenizer(tuned) as llama:
            by_task = {name: task_items(task, llama) for name, task in tasks.items()}
        yield _TUNED, tuned, {app: by_task[TASK_OF[app]] for app in APP_NAMES}, scratch


def _tasks(plan: Plan) -> Mapping[str, Task]:
    if plan.data is not None:
        return read_tasks(plan.data, _N_HELD_OUT, plan.seed)
    (task,) = generated_tasks(_N_GENERATED, plan.seed).values()
    return dict.fromkeys(TASK_OF.values(), task)


def _pairs(done: Sequence[Probe]) -> dict[str, set[Pair]]:
    """Return the pairs of levels that each app's requests used, and the whole model's."""
    found: dict[str, set[Pair]] = {app: {_WHOLE} for app in APP_NAMES}
    for probe in done:
        for one in probe.served:
            found[one.app].add(pair_of(LEVELS, one.levels))
    return found


def _ours(
    of: _Answering,
    asked: Mapping[str, Sequence[int]],
    pairs: Mapping[str, set[Pair]],
    *,
    is_quick: bool,
) -> dict[str, AppScores]:
    """Answer with levels of the model that ``llmaas elastic prepare`` writes."""
    variant = default_variant(prepared(of.model, of.folder, is_quick=is_quick), LEVELS)
    found: dict[str, AppScores] = {}
    for app, items in of.items.items():
        by_pair = of.kept.scores(of.set_of(app), variant, items, sorted(pairs[app]))
        rows = {question: i % len(items) for i, question in enumerate(asked[app])}
        right = [item.choice for item in items]
        found[app] = AppScores(by_pair, LEVELS, rows, by_pair[_WHOLE], right)
    return found


def _theirs(
    of: _Answering, method: str, ours: Mapping[str, AppScores], pairs: Mapping[str, set[Pair]]
) -> dict[str, AppScores]:
    """Answer with the narrowed models of another paper, which have one level for everything."""
    folder = of.folder / f"{of.model.stem}-{method}"
    source = folder / f"{of.model.stem}-as-f16.gguf"
    folder.mkdir(parents=True, exist_ok=True)
    if not source.exists():
        f16_copy(of.model, folder)
    windows = windows_of(source, packaged_documents(), _N_WINDOWS, _N_TOKENS)
    levels = [
        LEVELS[i] for i in sorted({prefill for each in pairs.values() for prefill, _ in each})
    ]
    found: dict[str, dict[Pair, Scores]] = {app: {} for app in APP_NAMES}
    for some, variant in BASELINES[method](Source(source, levels, windows, folder, of.scratch)):
        places = {(LEVELS.index(level),) * 2: i for i, level in enumerate(some)}
        for app, items in of.items.items():
            own = {pair: (at, at) for pair, at in places.items() if pair in pairs[app]}
            if not variant.levels:
                own = dict.fromkeys(own, _WHOLE)
            if own:
                name = f"{of.set_of(app)}-{method}-{'-'.join(f'{level:g}' for level in some)}"
                scores = of.kept.scores(name, variant, items, {*own.values()})
                found[app] |= {pair: scores[at] for pair, at in own.items()}
    return {app: ours[app]._replace(by_pair=by_pair) for app, by_pair in found.items()}


def _row(model: str, probe: Probe, method: str, apps: Mapping[str, AppScores]) -> Row:
    found: list[dict[str, Any]] = outcomes(probe, apps)
    columns = {key: [one[key] for one in found] for key in ("is_met", "agrees", "right", "nats")}
    case = probe.case._asdict()
    return {"row": "quality", **case, "rate": probe.rate, "model": model, "by": method, **columns}
