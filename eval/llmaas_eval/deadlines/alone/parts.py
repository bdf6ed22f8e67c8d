"""Parts of the study that ask the packaged model: all settings, other files, shorter prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmaas_eval.deadlines.alone.answering import Asked, answers
from llmaas_eval.deadlines.alone.promises import Promise, apart, together
from llmaas_eval.deadlines.alone.study import Row, rows_of
from llmaas_eval.deadlines.alone.variants import (
    PROMPT_SHARES,
    SCORERS,
    WEIGHTS,
    in_weights,
    settings,
    share_rows,
    shorter,
)
from llmaas_eval.deadlines.loaded.answers import Kept, app_items, tokenizer
from llmaas_eval.deadlines.loaded.questions import AppQuestions
from llmaas_eval.deadlines.loaded.scoring import Item
from llmaas_eval.elastic.engine import Variant
from llmaas_eval.elastic.prepared import prepared
from llmaas_plugins.elastic.latency import Latency
from llmaas_plugins.elastic.uniform import LEVELS
from llmaas_plugins.reference_model import reference_model_path

__all__ = ["PARTS", "Plan", "questions_of"]

_FURTHERS = LEVELS[:6]
_CONCISE = 0.85
"""Share of the tokens in prompts that callers have shortened themselves."""
_NAME = "packaged"


@dataclass(frozen=True, slots=True)
class Plan:
    """Questions, times and rivals of all parts.

    Attributes:
        sets: Questions by app.
        question_tokens: Number of the last tokens of each prompt that are the question, by app.
        latency: Returns measured times; the first call measures them.
        scratch: Models that were trained from scratch, by share.
        methods: Names of other papers' methods.
        folder: Folder for answers and files.
        is_quick: Whether only to check that everything works.
    """

    sets: Mapping[str, Sequence[Item]]
    question_tokens: Mapping[str, Sequence[int]]
    latency: Callable[[], Latency]
    scratch: Mapping[float, Path]
    methods: Sequence[str]
    folder: Path
    is_quick: bool


def questions_of(
    apps: Mapping[str, AppQuestions], n: int
) -> tuple[Mapping[str, Sequence[Item]], Mapping[str, Sequence[int]]]:
    """Return the tokens of the first ``n`` questions of each app, and those of the question alone.

    Raises:
        ValueError: A prompt's tokens change with the text after it.
    """
    with tokenizer(reference_model_path()) as llama:
        sets = {
            name: app_items(app, range(min(n, len(app.questions))), llama)
            for name, app in apps.items()
        }
        prefixes = {
            name: len(llama.tokenize(app.prefix.encode(), add_bos=True))
            for name, app in apps.items()
        }
    numbers = {
        name: [len(item.prompt) - prefixes[name] for item in items] for name, items in sets.items()
    }
    return sets, numbers


def _all_settings(plan: Plan) -> Iterator[Row]:
    """Yield the answers under each promise of a grid (Figs 15, 18d and 20a)."""
    model = reference_model_path()
    of = Asked(_NAME, model, plan.sets, plan.scratch, plan.methods, plan.is_quick)
    promises = [*_grid(), *together(LEVELS)]
    yield from rows_of(of, answers(of, plan.folder), plan.latency(), promises)


def _weights(plan: Plan) -> Iterator[Row]:
    """Yield the answers of ours with weights of several types (Fig 19a)."""
    found = settings(plan.sets, plan.latency())
    sets = {name: items for name, items in plan.sets.items() if name in found}
    for kind in WEIGHTS:
        path = in_weights(reference_model_path(), kind, plan.folder / "models")
        of = Asked(f"{_NAME}, {kind}", path, sets, {}, [], plan.is_quick, found)
        yield from rows_of(of, answers(of, plan.folder), plan.latency(), _grid())


def _reordering(plan: Plan) -> Iterator[Row]:
    """Yield the answers of ours with and without the reordering of units (Fig 18c).

    Neither is compensated, so that the order is all that differs.
    """
    found = settings(plan.sets, plan.latency())
    sets = {name: items for name, items in plan.sets.items() if name in found}
    for name, is_reordered in (("reordered, not compensated", True), ("not reordered", False)):
        of = Asked(
            f"{_NAME}, {name}",
            reference_model_path(),
            sets,
            {},
            [],
            plan.is_quick,
            found,
            is_compensated=False,
            is_reordered=is_reordered,
        )
        yield from rows_of(of, answers(of, plan.folder), plan.latency(), _grid())


def _concise(plan: Plan) -> Iterator[Row]:
    """Yield the answers to prompts of which callers left out 15 % (Fig 19b)."""
    sets = shorter(_prepared(plan), plan.sets, plan.question_tokens, SCORERS[-1], _CONCISE)
    found = settings(sets, plan.latency())
    some = {name: items for name, items in sets.items() if name in found}
    of = Asked(
        f"{_NAME}, prompts 15 % shorter",
        reference_model_path(),
        some,
        plan.scratch,
        plan.methods,
        plan.is_quick,
        found,
    )
    yield from rows_of(of, answers(of, plan.folder), plan.latency(), _grid())


def _shares(plan: Plan) -> Iterator[Row]:
    """Yield the whole model's answers to shorter prompts (Fig 4a)."""
    path = _prepared(plan)
    short = {
        (scorer, share): shorter(path, plan.sets, plan.question_tokens, scorer, share)
        for scorer in SCORERS
        for share in PROMPT_SHARES
    }
    kept = Kept(plan.folder / "answers")
    yield from share_rows(_NAME, Variant(reference_model_path()), plan.sets, short, kept)


PARTS: Mapping[str, Callable[[Plan], Iterator[Row]]] = {
    "answers": _all_settings,
    "weights": _weights,
    "reordering": _reordering,
    "concise": _concise,
    "shares": _shares,
}
"""Function of each part."""


# -- inside --------------------------------------------------------------------------------------


def _grid() -> list[Promise]:
    return apart(LEVELS, _FURTHERS)


def _prepared(plan: Plan) -> Path:
    return prepared(reference_model_path(), plan.folder / "models", is_quick=plan.is_quick)
