"""Facts stated early in a conversation and asked for late: text that a few lost bits visibly hurt.

Everything here is made up from word lists. The answers are short and scored by exact match.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

__all__ = [
    "Fact",
    "Question",
    "Recall",
    "distraction",
    "make_alike",
    "make_facts",
    "make_recall",
    "make_training",
]


def _words(text: str) -> list[str]:
    return text.split()


OBJECTS = _words(
    "locker garage safe gate suitcase piano bicycle cellar workshop boathouse printer elevator "
    "greenhouse mailbox freezer projector archive stable tent trailer"
)
PEOPLE = _words(
    "Anna Bruno Clara David Elena Felix Greta Hugo Irene Jonas Karen Laura Martin Nora Oscar Paula "
    "Robert Sarah Thomas Victor Wendy Alice Daniel Emma Frank Helen Jack Lucy Peter Rose"
)
PLACES = _words(
    "Paris London Berlin Madrid Rome Vienna Dublin Boston Chicago Denver Seattle Dallas Houston "
    "Atlanta Toronto Sydney Delhi Tokyo Cairo Athens Moscow Milan Miami Phoenix Portland"
)
EVENTS = _words(
    "concert lecture wedding auction rehearsal tournament parade exhibition ceremony breakfast "
    "seminar interview inspection meeting party race market film class dinner"
)

_ASIDES = (
    "Please remember that {}.",
    "Before I forget, {}.",
    "By the way, {}.",
    "Keep this for later: {}.",
    "Just so you know, {}.",
)
_REPLIES = ("I will keep that in mind.", "Noted.", "Thanks, I have it.", "Okay, I will remember.")


class Fact(NamedTuple):
    """What is stated, asked and expected: ``stem`` and ``answer`` together are the statement."""

    question: str
    stem: str
    answer: str


class Question(NamedTuple):
    """What comes after the context: the model is to go on from ``prompt`` with ``answer``."""

    prompt: str
    answer: str


class Recall(NamedTuple):
    """A context, and questions about it that are asked one at a time, each of the same context."""

    context: str
    questions: tuple[Question, ...]


def make_facts(random: Random, n: int) -> list[Fact]:
    """Facts about ``n`` different things, as many of each kind as possible."""
    kinds: tuple[tuple[Sequence[str], Callable[[Random, str], Fact]], ...] = (
        (OBJECTS, _code),
        (PEOPLE, _home),
        (EVENTS, _time),
        (OBJECTS, _owner),
    )
    share = -(-n // len(kinds))
    facts = [
        make(random, thing) for things, make in kinds for thing in random.sample(things, share)
    ]
    random.shuffle(facts)
    return facts[:n]


def _code(random: Random, thing: str) -> Fact:
    code = f"{random.randrange(100, 1000)}"
    return Fact(f"What is the code of the {thing}?", f"the code of the {thing} is", code)


def _home(random: Random, person: str) -> Fact:
    return Fact(f"Where does {person} live?", f"{person} lives in", random.choice(PLACES))


def _time(random: Random, event: str) -> Fact:
    time = f"{random.randrange(1, 13)}:{random.randrange(0, 60, 5):02}"
    return Fact(f"When does the {event} begin?", f"the {event} begins at", time)


def _owner(random: Random, thing: str) -> Fact:
    return Fact(f"Who owns the {thing}?", f"the {thing} belongs to", random.choice(PEOPLE))


def make_alike(random: Random, n: int) -> list[Fact]:
    """Facts that are almost the same: numbers of some people's some things, each in many facts."""
    side = math.ceil(math.sqrt(n))
    people, things = random.sample(PEOPLE, side), random.sample(OBJECTS, side)
    pairs = random.sample([(person, thing) for person in people for thing in things], n)
    return [_number(random, *pair) for pair in pairs]


def _number(random: Random, person: str, thing: str) -> Fact:
    number = f"{random.randrange(10_000, 100_000)}"
    its = f"the number of {person}'s {thing}"
    return Fact(f"What is {its}?", f"{its} is", number)


def distraction(random: Random, chats: Sequence[Sequence[str]], n_characters: int) -> list[str]:
    """Lines of other conversations, about ``n_characters`` of them, begun anywhere."""
    lines: list[str] = []
    while n_characters > 0:
        chat = random.choice(chats)
        start = random.randrange(len(chat))
        for line in chat[start : start + 8]:
            if n_characters > 0:
                lines.append(line)
                n_characters -= len(line)
    return lines


def make_recall(
    random: Random, chats: Sequence[Sequence[str]], facts: Sequence[Fact], n_characters: int
) -> Recall:
    """Facts among the first quarter of ``n_characters`` of distraction, questions after the rest.

    Args:
        random: Decides everything else.
        chats: Lines of ordinary conversations, each with its ``User: `` or ``Assistant: ``.
        facts: What is told, and asked for.
        n_characters: Of distraction, about.
    """
    lines: list[str] = []
    for fact in facts:
        lines += distraction(random, chats, n_characters // (4 * len(facts)))
        lines += _told(random, fact)
    lines += distraction(random, chats, n_characters - n_characters // 4)
    return Recall("".join(f"{line}\n" for line in lines), tuple(_asked(fact) for fact in facts))


def make_training(
    random: Random, chats: Sequence[Sequence[str]], n_characters: int, gap: int
) -> list[Question]:
    """Text in which facts are told and asked for all the time: pieces, each with its answer.

    The text is all prompts and answers in turn.

    Args:
        random: Decides everything.
        chats: For distraction.
        n_characters: Of all, about.
        gap: At most so many characters of distraction before each piece; half have none.
    """
    facts = random.choice((make_facts, make_alike))(random, 4 + n_characters // 150)
    told: list[Fact] = []
    pieces: list[Question] = []
    while n_characters > 0:
        lines = distraction(random, chats, random.choice((0, random.randrange(gap + 1))))
        for fact in (facts.pop() for _ in range(min(len(facts), random.randrange(1, 4)))):
            told.append(fact)
            lines += _told(random, fact)
        before = "".join(f"{line}\n" for line in lines)
        for fact in random.sample(told, min(len(told), random.randrange(2, 7))):
            prompt, answer = _asked(fact)
            pieces.append(Question(before + prompt, answer))
            n_characters -= len(before) + len(prompt)
            before = ""
    return pieces


def _told(random: Random, fact: Fact) -> list[str]:
    statement = f"{fact.stem} {fact.answer}"
    aside = random.choice(_ASIDES).format(statement)
    return [f"User: {aside}", f"Assistant: {random.choice(_REPLIES)}"]


def _asked(fact: Fact) -> Question:
    stem = fact.stem[0].upper() + fact.stem[1:]
    return Question(f"User: {fact.question}\nAssistant: {stem}", f" {fact.answer}.\n")
