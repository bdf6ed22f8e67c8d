"""Answers of models with a meaning at each pair of levels, kept in files.

Times come from a random model; these come from the packaged model of 7 M weights, and from a copy
of it that was tuned to three tasks, on which it is far from chance.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from llama_cpp import Llama

from llmaas_eval.deadlines.loaded.questions import AppQuestions
from llmaas_eval.deadlines.loaded.scoring import Item, Scores, scores
from llmaas_eval.elastic.engine import Variant
from llmaas_eval.tasks.questions import Task, asked

__all__ = ["TASK_OF", "Kept", "app_items", "task_items", "tokenizer"]

TASK_OF: Mapping[str, str] = {
    "Rewind": "news",
    "GMail": "sentiment",
    "Octopus": "functions",
    "Shortcuts": "functions",
    "Gboard": "sentiment",
    "XiaoAi": "news",
}
"""Task of the tuned model whose questions stand for an app's."""


class Kept:
    """Scores of models on questions, in a folder. Scores that are there are not measured again."""

    def __init__(self, folder: Path) -> None:
        """Keep scores in ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def scores(
        self, name: str, variant: Variant, items: Sequence[Item], *, only_equal: bool = False
    ) -> Scores:
        """Return the scores of a variant; see ``scoring.scores``."""
        path = self._folder / f"{name}.npz"
        if path.exists():
            with np.load(path, allow_pickle=False) as file:
                found = Scores(file["choice"], file["nats"])
            if len(found.choice) == len(items):
                return found
        found = scores(variant, items, only_equal=only_equal, name=name)
        partial = path.with_suffix(".partial.npz")
        np.savez_compressed(partial, **found._asdict())
        partial.replace(path)
        return found


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
