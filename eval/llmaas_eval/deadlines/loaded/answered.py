"""Quality of the probes' requests by the answers of two models and of narrowed ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmaas_eval.data import packaged_documents
from llmaas_eval.deadlines.loaded.answers import TASK_OF, Kept, app_items, task_items, tokenizer
from llmaas_eval.deadlines.loaded.baselines import BASELINES, Source
from llmaas_eval.deadlines.loaded.probes import Probe, Probes
from llmaas_eval.deadlines.loaded.quality import AppScores, outcomes
from llmaas_eval.deadlines.loaded.questions import AppQuestions
from llmaas_eval.deadlines.loaded.scoring import Item, Scores
from llmaas_eval.deadlines.loaded.study import Plan, Row
from llmaas_eval.deadlines.loaded.traces import ALPHAS, APP_NAMES
from llmaas_eval.elastic.prepared import default_variant
from llmaas_eval.elastic.texts import windows_of
from llmaas_eval.tasks.questions import Task, generated_tasks, read_tasks
from llmaas_eval.weights import f16_copy
from llmaas_plugins.cli.main import main as llmaas
from llmaas_plugins.elastic.uniform import LEVELS
from llmaas_plugins.reference_model import reference_model_path

__all__ = ["answered"]

_ONE_LEVEL = "fifo-one-level"
"""System that serves the narrowed models of other papers."""
_N_HELD_OUT = 512
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
    used = {app: _used(probes, app) for app in APP_NAMES}
    for name, model, items in _models(plan, apps, used, folder):
        ours = _ours(kept, name, model, items, used, folder, is_quick=plan.shape == "tiny")
        yield from (_row(name, probe, probe.case.system, ours) for probe in done)
        ones = [probe for probe in done if probe.case.system == _ONE_LEVEL]
        for method in BASELINES if ones else ():
            theirs = _theirs(kept, name, method, model, items, ours, folder)
            yield from (_row(name, probe, method, theirs) for probe in ones)


# -- inside --------------------------------------------------------------------------------------


def _used(probes: Probes, app: str) -> list[int]:
    """Return the app's questions that any of the mixes asks."""
    arrivals = [one for alpha in ALPHAS for one in probes.arrivals(alpha)]
    return sorted({one.question for one in arrivals if one.app == app})


def _models(
    plan: Plan, apps: Mapping[str, AppQuestions], used: Mapping[str, Sequence[int]], folder: Path
) -> Iterator[tuple[str, Path, Mapping[str, Sequence[Item]]]]:
    """Yield each model's name, file, and its questions by app."""
    packaged = reference_model_path()
    with tokenizer(packaged) as llama:
        yield (
            "packaged",
            packaged,
            {app: app_items(apps[app], used[app], llama) for app in APP_NAMES},
        )
    if plan.n_tuned:
        from llmaas_eval.tasks.tuning import tune

        tasks = _tasks(plan)
        tuned = tune(packaged, tasks, plan.n_tuned, folder / "models", plan.seed)
        with tokenizer(tuned) as llama:
            by_task = {name: task_items(task, llama) for name, task in tasks.items()}
        yield "tuned", tuned, {app: by_task[TASK_OF[app]] for app in APP_NAMES}


def _tasks(plan: Plan) -> Mapping[str, Task]:
    if plan.data is not None:
        return read_tasks(plan.data, _N_HELD_OUT, plan.seed)
    (task,) = generated_tasks(_N_HELD_OUT, plan.seed).values()
    return dict.fromkeys(TASK_OF.values(), task)


def _ours(  # noqa: PLR0913, PLR0917  the parts of a model's answers
    kept: Kept,
    name: str,
    model: Path,
    items: Mapping[str, Sequence[Item]],
    used: Mapping[str, Sequence[int]],
    folder: Path,
    *,
    is_quick: bool,
) -> dict[str, AppScores]:
    """Answer with all pairs of levels of the model that ``llmaas elastic prepare`` writes."""
    prepared = _prepared(name, model, folder / "models", is_quick=is_quick)
    variant = default_variant(prepared, LEVELS)
    found: dict[str, AppScores] = {}
    for app, some in items.items():
        scores = kept.scores(f"{name}-{_set_of(name, app)}", variant, some)
        found[app] = AppScores(
            scores,
            LEVELS,
            {question: i % len(some) for i, question in enumerate(used[app])},
            scores.choice[:, 0, 0].tolist(),
            [item.choice for item in some],
            scores.nats[:, 0, 0].tolist(),
        )
    return found


def _prepared(name: str, model: Path, folder: Path, *, is_quick: bool) -> Path:
    """Return the file that ``llmaas elastic prepare`` writes; make it if it is missing."""
    folder.mkdir(exist_ok=True)
    path, partial = folder / f"{name}.elastic.gguf", folder / f"{name}.preparing.gguf"
    if not path.exists():
        command = ["elastic", "prepare", str(model), "-o", str(partial)]
        command += ["--scores", str(folder / f"{name}.scores.npz")]
        if llmaas([*command, *(["--no-search"] if is_quick else [])]):
            raise RuntimeError(f"{model} cannot be prepared")
        partial.replace(path)  # before the end, it has only the uniform widths
    return path


def _theirs(  # noqa: PLR0913, PLR0917  the parts of a model's answers
    kept: Kept,
    name: str,
    method: str,
    model: Path,
    items: Mapping[str, Sequence[Item]],
    ours: Mapping[str, AppScores],
    folder: Path,
) -> dict[str, AppScores]:
    """Answer with the narrowed models of another paper; the whole model's answers are ours."""
    models = folder / "models" / f"{name}-{method}"
    source = models / f"{model.stem}-as-f16.gguf"
    models.mkdir(parents=True, exist_ok=True)
    if not source.exists():
        f16_copy(model, models)
    windows = windows_of(source, packaged_documents(), _N_WINDOWS, _N_TOKENS)
    found = {app: _empty(each.scores) for app, each in ours.items()}
    for levels, variant in BASELINES[method](Source(source, LEVELS, windows, models)):
        for app, some in items.items():
            part = f"{name}-{method}-{_set_of(name, app)}-{levels[0]:g}"
            scores = kept.scores(part, variant, some, only_equal=True)
            for i, level in enumerate(levels):
                own, at = LEVELS.index(level), i if variant.levels else 0
                found[app].choice[:, own, own] = scores.choice[:, at, at]
                found[app].nats[:, own, own] = scores.nats[:, at, at]
    return {app: ours[app]._replace(scores=scores) for app, scores in found.items()}


def _set_of(name: str, app: str) -> str:
    """Return the name of the questions that stand for an app's."""
    return TASK_OF[app] if name == "tuned" else app


def _empty(scores: Scores) -> Scores:
    return Scores(np.full_like(scores.choice, -1), np.full_like(scores.nats, np.nan))


def _row(model: str, probe: Probe, method: str, apps: Mapping[str, AppScores]) -> Row:
    found: list[dict[str, Any]] = outcomes(probe, apps)
    columns = {key: [one[key] for one in found] for key in ("is_met", "agrees", "right", "nats")}
    case = probe.case._asdict()
    return {"row": "quality", **case, "rate": probe.rate, "model": model, "by": method, **columns}
