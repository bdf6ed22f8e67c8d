"""Facts stated early in a conversation and asked for late: a few lost bits visibly hurt such text.

All text is generated from word lists. Answers are short and scored by exact match.
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
    """A question, and the statement that answers it: ``stem`` followed by ``answer``."""

    question: str
    stem: str
    answer: str


class Question(NamedTuple):
    """A prompt after the context, and the ``answer`` with which the model should continue it."""

    prompt: str
    answer: str


class Recall(NamedTuple):
    """A context and questions about it; each question is asked directly after the context."""

    context: str
    questions: tuple[Question, ...]


def make_facts(random: Random, n: int) -> list[Fact]:
    """Return facts about ``n`` different things, with equal numbers of each kind if possible."""
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
    """Return facts that resemble each other: numbers of a few people's few things.

    Each person and each thing is in several facts.
    """
    side = math.ceil(math.sqrt(n))
    people, things = random.sample(PEOPLE, side), random.sample(OBJECTS, side)
    pairs = random.sample([(person, thing) for person in people for thing in things], n)
    return [_number(random, *pair) for pair in pairs]


def _number(random: Random, person: str, thing: str) -> Fact:
    number = f"{random.randrange(10_000, 100_000)}"
    its = f"the number of {person}'s {thing}"
    return Fact(f"What is {its}?", f"{its} is", number)


def distraction(random: Random, chats: Sequence[Sequence[str]], n_characters: int) -> list[str]:
    """Return lines of other conversations, about ``n_characters`` in all, from random places."""
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
    """Return a context with ``facts`` spread over the first quarter of its distraction.

    The remaining distraction follows the last fact; the questions come after it.

    Args:
        random: Source of all random choices.
        chats: Lines of ordinary conversations; each line begins with ``User: `` or ``Assistant: ``.
        facts: Facts to state and to ask for.
        n_characters: Approximate length of the distraction in characters.
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
    """Return text that constantly states facts and asks for them: pieces with their answers.

    The text is the sequence of all prompts, each followed by its answer.

    Args:
        random: Source of all random choices.
        chats: Conversations for distraction.
        n_characters: Approximate length of the text in characters.
        gap: Maximum of distraction before a piece, in characters; half of the pieces have none.
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
