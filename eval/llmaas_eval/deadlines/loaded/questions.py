"""Questions of the six apps, each after the same solved examples, as in ElastiLM's evaluation.

A question is followed by the text of one of its choices. The choices are not part of the prompt;
the model's choice is the likeliest text. The sets are those of Table 3, but for XiaoAi, whose set
SCIQ is not at hand: it asks the science questions of ARC's challenge set.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from llmaas_eval.data import packaged_lines

__all__ = [
    "SETS",
    "TASK_OF",
    "AppQuestions",
    "Question",
    "packaged_questions",
    "read_questions",
]

SETS: Mapping[str, str] = {
    "Rewind": "OpenBookQA",
    "GMail": "ARC-Easy",
    "Octopus": "Octopus",
    "Shortcuts": "LlamaTouch",
    "Gboard": "PIQA",
    "XiaoAi": "ARC-Challenge, as SCIQ is not at hand",
}
TASK_OF: Mapping[str, str] = {
    "Rewind": "news",
    "GMail": "sentiment",
    "Octopus": "functions",
    "Shortcuts": "functions",
    "Gboard": "sentiment",
    "XiaoAi": "news",
}
"""Task of the tuned model whose questions stand for an app's."""
_LONGEST_QUESTION, _LONGEST_CHOICE = 160, 120
_LONGEST_SHOT = 90
"""Most characters of a question, of a choice, and of a question of a solved example."""
_N_SHOTS, _N_FUNCTION_SHOTS = 5, 6
_CHOICES = re.compile(
    r".*?question: (.*?)\n\n(?:Answer|Solution)1: (.*)\n\nAnswer format: \S+", re.DOTALL
)
_NEXT_CHOICE = re.compile(r"\s+(?:Answer|Solution)\d: ")

_Item = TypeVar("_Item")


class Question(NamedTuple):
    """A question, its choices, and the index of the right one."""

    text: str
    choices: Sequence[str]
    choice: int


class AppQuestions(NamedTuple):
    """An app's questions.

    Attributes:
        prefix: Beginning of each prompt: solved examples.
        questions: Questions to ask; none of them is among the examples.
    """

    prefix: str
    questions: Sequence[Question]

    def prompt(self, index: int) -> str:
        """Return the prompt that asks a question."""
        return f"{self.prefix}{_asked(self.questions[index])}"


def read_questions(folder: Path) -> Mapping[str, AppQuestions]:
    """Read the questions of all apps.

    Args:
        folder: Folder with the sets.

    Raises:
        OSError: A set cannot be read.
        ValueError: A set has too few questions of a usable length.
    """
    return {
        "Rewind": _split(_solved(folder, "openbookqa_train"), _solved(folder, "openbookqa_test")),
        "GMail": _split(_solved(folder, "arc-easy_train"), _solved(folder, "arc-easy_test")),
        "Octopus": _functions(folder / "octopus_android_val.csv"),
        "Shortcuts": _one_set(_phone_apps(folder / "llamatouch_test.tsv")),
        "Gboard": _one_set(_solved(folder, "piqa_test")),
        "XiaoAi": _split(
            _solved(folder, "arc-challenge_train"), _solved(folder, "arc-challenge_test")
        ),
    }


def packaged_questions() -> Mapping[str, AppQuestions]:
    """Return lines of the packaged conversations as questions, for times only: all are alike."""
    lines = [line for talk in packaged_lines() for line in talk]
    found = [Question(line, ("yes", "no"), 0) for line in _unique(lines, lambda line: line)]
    starts = {app: i * len(found) // len(SETS) for i, app in enumerate(SETS)}
    return {app: _one_set(found[start:] + found[:start]) for app, start in starts.items()}


# -- inside --------------------------------------------------------------------------------------


def _asked(question: Question) -> str:
    return f"Question: {question.text}\nAnswer:"


def _split(
    shots: Iterable[Question], questions: Iterable[Question], about: str = ""
) -> AppQuestions:
    """Return questions after examples of another set."""
    shown = [one for one in shots if len(one.text) <= _LONGEST_SHOT][:_N_SHOTS]
    return _after(shown, questions, about)


def _one_set(questions: Sequence[Question]) -> AppQuestions:
    """Return a set's questions after examples of its first ones, which are not asked."""
    return _split(questions, questions)


def _after(
    shots: Sequence[Question], questions: Iterable[Question], about: str = ""
) -> AppQuestions:
    prefix = about + "".join(f"{_asked(one)} {one.choices[one.choice]}\n" for one in shots)
    shown = {one.text for one in shots}
    usable = [
        one
        for one in _unique(questions, lambda one: one.text)
        if one.text not in shown
        and len(one.text) <= _LONGEST_QUESTION
        and max(map(len, one.choices)) <= _LONGEST_CHOICE
    ]
    if not shots or not usable:
        raise ValueError(
            f"found {len(shots)} examples and {len(usable)} questions of a usable length"
        )
    return AppQuestions(prefix, usable)


def _unique(items: Iterable[_Item], key: Callable[[_Item], str]) -> list[_Item]:
    """Return the first item of each key."""
    return list({key(one): one for one in reversed([*items])}.values())[::-1]


def _solved(folder: Path, name: str) -> list[Question]:
    """Return the questions of a set with numbered choices."""
    with (folder / f"{name}.jsonl").open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    found = [(_CHOICES.fullmatch(row["instruction"]), row["answer"]) for row in rows]
    return [
        Question(_line(match[1]), [*map(_line, _NEXT_CHOICE.split(match[2]))], int(answer[-1]) - 1)
        for match, answer in found
        if match
    ]


def _functions(path: Path) -> AppQuestions:
    """Return requests for one of a phone's functions, after a list of them.

    A row is a request, the names of the functions, and the letter of the right one.
    """
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = [*csv.reader(file)]
    found = [Question(_line(row[0]), row[1:-1], ord(row[-1]) - ord("A")) for row in rows]
    by_function = _unique(found, lambda one: one.choices[one.choice])
    shots = [one for one in by_function if len(one.text) <= _LONGEST_SHOT][:_N_FUNCTION_SHOTS]
    return _after(shots, found, f"Functions: {', '.join(found[0].choices)}\n")


def _phone_apps(path: Path) -> list[Question]:
    """Return requests for one of a phone's apps: a row is a request and the app's name."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = [*csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)]
    names = sorted({row[1] for row in rows})
    first = _unique([(text, name) for text, name in rows], lambda row: row[1])
    return [Question(_line(text), names, names.index(name)) for text, name in [*first, *rows]]


def _line(text: str) -> str:
    return " ".join(text.split())
