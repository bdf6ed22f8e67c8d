"""Answers of models with a meaning at each pair of levels, kept in files.

Times come from a random model; these come from the packaged model of 7 M weights, and from a copy
of it that was tuned to three tasks, on which it is far from chance.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from llama_cpp import Llama

from llmaas_eval.deadlines.loaded.questions import AppQuestions
from llmaas_eval.deadlines.loaded.scoring import Item, Pair, Scores, Wanted, scores, unanswered
from llmaas_eval.elastic.engine import Variant
from llmaas_eval.tasks.questions import Task, asked

__all__ = ["Kept", "app_items", "task_items", "tokenizer"]


class Kept:
    """Scores of models on questions, in a folder. A question that was asked is not asked again."""

    def __init__(self, folder: Path) -> None:
        """Keep scores in ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def scores(
        self, name: str, n: int, wanted: Wanted, ask: Callable[[Wanted], Mapping[Pair, Scores]]
    ) -> dict[Pair, Scores]:
        """Return scores by pair of levels; all questions that are wanted have some.

        Args:
            name: Name of the model and of its questions.
            n: Number of questions.
            wanted: Questions that must have scores.
            ask: Function that scores the questions that have none.
        """
        paths = {pair: self._folder / f"{name}-{pair[0]}-{pair[1]}.npz" for pair in wanted}
        found = {pair: _read(path, n) for pair, path in paths.items()}
        missing = {
            pair: rows
            for pair, some in wanted.items()
            if (rows := [i for i in sorted({*some}) if found[pair].choice[i] < 0])
        }
        for pair, more in (ask(missing) if missing else {}).items():
            is_new = more.choice >= 0
            for old, new in zip(found[pair], more, strict=True):
                old[is_new] = new[is_new]
            partial = paths[pair].with_suffix(".partial.npz")
            np.savez_compressed(partial, **found[pair]._asdict())
            partial.replace(paths[pair])
        return found

    def variant_scores(
        self, name: str, variant: Callable[[], Variant], items: Sequence[Item], wanted: Wanted
    ) -> dict[Pair, Scores]:
        """Return a variant's scores by pair of levels; it is made if some are missing."""
        return self.scores(
            name, len(items), wanted, lambda missing: scores(variant(), items, missing, name)
        )

    def all_scores(
        self,
        name: str,
        variant: Callable[[], Variant],
        items: Sequence[Item],
        pairs: Collection[Pair],
    ) -> dict[Pair, Scores]:
        """Return a variant's scores on all questions by pair of levels."""
        wanted = dict.fromkeys(pairs, range(len(items)))
        return self.variant_scores(name, variant, items, wanted)


def _read(path: Path, n: int) -> Scores:
    """Return the kept scores of ``n`` questions."""
    if not path.exists():
        return unanswered(n)
    with np.load(path, allow_pickle=False) as file:
        found = Scores(file["choice"], file["nats"])
    return found if len(found.choice) == n else unanswered(n)


@contextlib.contextmanager
def tokenizer(model: Path) -> Iterator[Llama]:
    """Open a model's vocabulary."""
    with contextlib.closing(Llama(str(model), vocab_only=True, verbose=False)) as llama:
        yield llama


def app_items(app: AppQuestions, indices: Sequence[int], llama: Llama) -> list[Item]:
    """Return the tokens of an app's questions.

    Raises:
        ValueError: A prompt's tokens change with the text after it.
    """

    def tokens(text: str) -> list[int]:
        return list(llama.tokenize(text.encode(), add_bos=True))

    found = []
    for index in indices:
        text, question = app.prompt(index), app.questions[index]
        prompt, choices = tokens(text), list[list[int]]()
        for choice in question.choices:
            whole = tokens(f"{text} {choice}")
            if whole[: len(prompt)] != prompt:
                raise ValueError(f"the tokens of {text[-40:]!r} change before {choice!r}")
            choices.append(whole[len(prompt) :])
        found.append(Item(prompt, [], choices, question.choice))
    return found


def task_items(task: Task, llama: Llama) -> list[Item]:
    """Return the tokens of a task's held-out questions."""
    bos = llama.token_bos()

    def tokens(text: str) -> list[int]:
        return list(llama.tokenize(text.encode(), add_bos=False))

    ones = [asked(task, question, tokens) for question in task.held_out]
    return [
        Item([bos, *one.prompt], one.lead, [[token] for token in one.choices], one.choice)
        for one in ones
    ]
