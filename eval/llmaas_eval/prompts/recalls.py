"""Questions about facts of a conversation, with the distance of each fact."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import NamedTuple

import numpy as np

from llmaas_eval.prompts.engine import Engine
from llmaas_eval.prompts.passages import Passage
from llmaas_eval.tolerance.recall import (
    Fact,
    Question,
    distraction,
    make_alike,
    make_facts,
    make_recall,
)
from llmaas_hooks import Tokens

__all__ = ["PROBES", "Asked", "Context", "Layout", "as_passage", "contexts", "mixed"]

_MAKERS = {"facts": make_facts, "alike": make_alike}
PROBES = tuple(_MAKERS)
"""Probes of recall: facts about different things, and facts that resemble each other."""
_EACH = 4
"""One of so many mixed prompts is a question about a fact."""


class Layout(NamedTuple):
    """Sizes of contexts.

    Attributes:
        n_facts: Number of facts in each.
        characters: Range of the characters of distraction; facts are in its first quarter.
        longest: Most tokens.
        most_before: Most characters of more distraction, before the first fact.
    """

    n_facts: int
    characters: tuple[int, int]
    longest: int
    most_before: int = 0


class Asked(NamedTuple):
    """A question after a context.

    Attributes:
        prompt: Tokens of the question, and of the beginning of its answer.
        answer: Tokens of the answer, without its full stop.
        distance: Number of tokens between the statement of the fact and the prompt's end.
    """

    prompt: Tokens
    answer: Tokens
    distance: int


class Context(NamedTuple):
    """A conversation in which facts are stated, and questions about them.

    Attributes:
        probe: One of ``PROBES``.
        number: Number of the context.
        tokens: Tokens of the conversation.
        asked: Questions; each is asked directly after the conversation.
    """

    probe: str
    number: int
    tokens: Tokens
    asked: Sequence[Asked]


def contexts(
    engine: Engine,
    chats: Sequence[Sequence[str]],
    n: int,
    layout: Layout,
    probes: Sequence[str] = PROBES,
) -> Iterator[Context]:
    """Yield ``n`` contexts of each probe; the probes take turns.

    Args:
        engine: Engine whose tokens are used.
        chats: Lines of conversations for distraction.
        n: Number of contexts of each probe.
        layout: Sizes of the contexts.
        probes: Names of probes.
    """
    randoms = {probe: Random(f"prompts {probe}") for probe in probes}  # noqa: S311 - texts
    for number in range(n):
        for probe, random in randoms.items():
            yield _context(engine, chats, (probe, number), random, layout)


def as_passage(context: Context, question: int) -> Passage:
    """Return a conversation with one question as a prompt, and its answer as the rest."""
    asked = context.asked[question]
    prompt = np.concatenate([context.tokens, asked.prompt])
    n_question = len(asked.prompt)
    return Passage(context.probe, context.number, prompt, n_question, asked.answer, context.number)


def mixed(talks: Iterator[Passage], asked: Iterator[Passage], n: int) -> Iterator[Passage]:
    """Yield ``n`` numbered prompts; every fourth is a question about a fact.

    Args:
        talks: Parts of conversations.
        asked: Questions about facts.
        n: Number of prompts.
    """
    for number in range(n):
        yield next(asked if number % _EACH == _EACH - 1 else talks)._replace(number=number)


def _context(
    engine: Engine,
    chats: Sequence[Sequence[str]],
    name: tuple[str, int],
    random: Random,
    layout: Layout,
) -> Context:
    while True:
        facts = _MAKERS[name[0]](random, layout.n_facts)
        recall = make_recall(random, chats, facts, random.randrange(*layout.characters))
        text = _before(random, chats, layout.most_before) + recall.context
        tokens = engine.tokens(text)
        if len(tokens) <= layout.longest:
            pairs = zip(facts, recall.questions, strict=True)
            asked = [_asked(engine, text, *pair) for pair in pairs]
            return Context(*name, tokens, asked)


def _before(random: Random, chats: Sequence[Sequence[str]], most: int) -> str:
    """Return distraction of a random length; none, and no random choice, if ``most`` is 0."""
    if most == 0:
        return ""
    return "".join(f"{line}\n" for line in distraction(random, chats, random.randrange(most + 1)))


def _asked(engine: Engine, context: str, fact: Fact, question: Question) -> Asked:
    prompt = engine.tokens(question.prompt)
    answer = engine.tokens(question.prompt + question.answer)[len(prompt) : -2]
    end = context.index(f"{fact.stem} {fact.answer}") + len(f"{fact.stem} {fact.answer}")
    after = engine.tokens(context)[len(engine.tokens(context[:end])) :]
    return Asked(prompt, answer, len(after) + len(prompt))
