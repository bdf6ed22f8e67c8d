"""Questions with one right choice among a few words: sentiment, news, and a phone's functions.

Each choice is one token of the vocabulary, so that one evaluation scores all choices. An answer has
some words before the choice: they are the tokens that the sparse mode computes sparsely.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np

from llmaas_eval.tasks.requests import FUNCTIONS, generate_request

__all__ = [
    "Asked",
    "Question",
    "Task",
    "asked",
    "generated_tasks",
    "mixed",
    "read_tasks",
    "text_of",
]

Tokenize = Callable[[str], list[int]]

_NEWS_KINDS = ("world", "sports", "business", "science")
_FUNCTION_WORDS: Mapping[str, str] = {
    "take a photo": "shot", "set timer alarm": "time", "change screen brightness": "screen",
    "create calendar event": "event", "set volume": "sound",
    "connect to bluetooth device": "pair", "enable do not disturb": "quiet",
    "set nest temperature": "warm", "play music on nest hub": "song",
    "play video on nest hub": "movie", "open or lock door": "door", "get trending news": "news",
    "irrelevant function": "none", "get weather forecast": "weather", "send email": "letter",
    "search youtube videos": "search", "find route google maps": "road",
    "check nest smoke detector status": "fire", "send text message": "write",
    "make phone call": "call", "create contact": "name",
}  # fmt: skip
"""Word of each function: one token, like the functional tokens of Octopus."""
_HELD_OUT_EVERY = 8
"""A row of the news is held out for this many rows."""
_N_GENERATED = 8_000
"""Requests that are generated to train on."""


class Question(NamedTuple):
    """A prompt, and the index of the right choice."""

    prompt: str
    choice: int


class Task(NamedTuple):
    """Questions of a kind.

    Attributes:
        lead: Words of each answer before the choice.
        choices: Words to choose from.
        training: Questions to train on.
        held_out: Questions to judge by.
    """

    lead: str
    choices: Sequence[str]
    training: Sequence[Question]
    held_out: Sequence[Question]


class Asked(NamedTuple):
    """Tokens of a question.

    Attributes:
        prompt: Tokens of the prompt, without a begin-of-sequence token.
        lead: Tokens of the answer before the choice.
        end: Tokens after the choice.
        choices: Token of each choice.
        choice: Index of the right choice.
    """

    prompt: list[int]
    lead: list[int]
    end: list[int]
    choices: Sequence[int]
    choice: int


def read_tasks(data: Path, n_questions: int, seed: int) -> Mapping[str, Task]:
    """Read the tasks from a folder; requests to train on are generated.

    Args:
        data: Folder whose folder ``tasks`` has the sets.
        n_questions: Most questions of a task to judge by.
        seed: Seed of the generated requests.

    Raises:
        OSError: A set cannot be read.
    """
    folder = data / "tasks"
    news = [_news(row) for row in _rows(folder / "ag_news_test.jsonl")]
    held_out = news[::_HELD_OUT_EVERY]
    known = {one.prompt for one in held_out}
    functions = _function_questions(folder / "octopus_android_val.csv")
    return {
        "sentiment": Task(
            "The review is",
            ("bad", "good"),
            [_review(row) for row in _rows(folder / "sst2_train.jsonl")],
            _spread([_review(row) for row in _rows(folder / "sst2_test.jsonl")], n_questions),
        ),
        "news": Task(
            "The topic is",
            _NEWS_KINDS,
            [one for one in news if one.prompt not in known],
            _spread(held_out, n_questions),
        ),
        "functions": _functions(seed, _N_GENERATED, _spread(functions, n_questions)),
    }


def generated_tasks(n_questions: int, seed: int) -> Mapping[str, Task]:
    """Return generated requests alone, to check the study without data sets."""
    held_out = list(_requests(seed + 1, n_questions))
    return {"functions": _functions(seed, 4 * n_questions, held_out)}


def text_of(task: Task, question: Question) -> str:
    """Return a question with its answer, as a line of a longer text.

    It begins with a space, so that its tokens are the same within a text and alone.
    """
    return f" {question.prompt} {task.lead} {task.choices[question.choice]}\n"


def asked(task: Task, question: Question, tokenize: Tokenize) -> Asked:
    """Return the tokens of a question.

    Raises:
        ValueError: A choice is not one token of the vocabulary.
    """
    choices = [tokenize(choice) for choice in task.choices]
    for word, tokens in zip(task.choices, choices, strict=True):
        if len(tokens) != 1:
            raise ValueError(f"{word!r} has {len(tokens)} tokens, expected 1: use another model")
    whole, prompt = tokenize(text_of(task, question)[1:]), tokenize(question.prompt)
    n_lead = len(tokenize(task.lead))
    start = len(prompt) + n_lead
    token = choices[question.choice][0]
    if whole[: len(prompt)] != prompt or whole[start] != token:
        raise ValueError(f"{whole} does not begin with the prompt's tokens: use another model")
    lead, end = whole[len(prompt) : start], whole[start + 1 :]
    return Asked(prompt, lead, end, [each for (each,) in choices], question.choice)


def mixed(tasks: Mapping[str, Task], seed: int) -> Iterator[tuple[Task, Question]]:
    """Yield questions to train on without end; tasks are equally likely.

    All questions of a task come once before one comes again.
    """
    random = Random(seed)  # noqa: S311 - texts, no secret
    turns = [_turns(task, random) for task in tasks.values()]
    while True:
        yield next(random.choice(turns))


# -- inside --------------------------------------------------------------------------------------


def _functions(seed: int, n_training: int, held_out: Sequence[Question]) -> Task:
    words = [_FUNCTION_WORDS[name] for name in FUNCTIONS]
    return Task("The function is", words, list(_requests(seed, n_training)), held_out)


def _requests(seed: int, n: int) -> Iterator[Question]:
    random, names = Random(seed), list(FUNCTIONS)  # noqa: S311 - texts, no secret
    for number in range(n):
        choice = number % len(names)
        yield _request(generate_request(random, names[choice]), choice)


def _function_questions(path: Path) -> list[Question]:
    """Return the requests of a table of a request, function names, and the right one's letter."""
    names = list(FUNCTIONS)
    with path.open(encoding="utf-8-sig", newline="") as file:
        return [
            _request(row[0], names.index(row[1 + ord(row[-1]) - ord("A")]))
            for row in csv.reader(file)
        ]


def _request(text: str, choice: int) -> Question:
    return Question(f"User: {_line(text)}\nAssistant:", choice)


def _review(row: Mapping[str, Any]) -> Question:
    return Question(f"Review: {_line(row['text'])}\nAssistant:", int(row["label"]))


def _news(row: Mapping[str, Any]) -> Question:
    text = _line(f"{row['title']}. {row['text']}".replace("\\", " "))
    return Question(f"News: {text}\nAssistant:", int(row["label"]) - 1)


def _line(text: str) -> str:
    return " ".join(text.split())


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def _spread(questions: Sequence[Question], n: int) -> list[Question]:
    """Return at most ``n`` questions, evenly spread."""
    picks = np.linspace(0, len(questions) - 1, min(n, len(questions))).round().astype(int)
    return [questions[pick] for pick in picks]


def _turns(task: Task, random: Random) -> Iterator[tuple[Task, Question]]:
    order = list(task.training)
    while True:
        random.shuffle(order)
        for question in order:
            yield task, question
