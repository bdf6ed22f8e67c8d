"""Users simulated from chat sets (§5.1): by topic, by service, by task, by cloud model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from llmaas_eval.data import chat_rows

__all__ = ["USERS", "Chat", "Split", "load", "split"]

_TEST_SHARE = 0.3
_LONG_ANSWER = 128
"""Characters; as in the paper, single-turn answers must be longer than this."""


class Chat(NamedTuple):
    """A conversation: its turns as pairs of role and content."""

    name: str
    turns: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        """The conversation in the reference model's chat format."""
        return "".join(f"{role.capitalize()}: {content}\n" for role, content in self.turns)


class Split(NamedTuple):
    """A user's history (``train``), and the conversations to score (``test``)."""

    train: list[Chat]
    test: list[Chat]


def load(data: Path, name: str) -> list[Chat]:
    """Read all conversations of user ``name`` from the folder of the data sets."""
    source, belongs = USERS[name]
    return [_chat(row) for row in chat_rows(data, source) if belongs(row)]


def split(chats: Sequence[Chat], seed: str) -> Split:
    """Split the conversations at random into 70 % for training and 30 % for testing."""
    order = list(chats)
    Random(seed).shuffle(order)  # noqa: S311 - not for security
    n_test = round(_TEST_SHARE * len(order))
    return Split(order[n_test:], order[:n_test])


def _chat(row: Mapping[str, Any]) -> Chat:
    return Chat(row["id"], tuple((turn["role"], turn["content"].strip()) for turn in row["turns"]))


_Belongs = Callable[[Mapping[str, Any]], bool]

_TOPICS = {
    "health": "health healthy diet exercise disease medical doctor patient symptom nutrition "
    "vitamin sleep stress anxiety therapy fitness workout medicine",
    "business": "business company customer market marketing product sales brand employee startup "
    "advertising entrepreneur investment finance financial economy",
    "nature": "animal plant climate environment environmental ecosystem species ocean forest "
    "pollution water energy earth planet renewable carbon wildlife",
    "technology": "computer software algorithm code python machine data internet website "
    "programming program app artificial digital network robot",
}
"""Words in an instruction or its answer that indicate a topic."""


def _topic(row: Mapping[str, Any]) -> str | None:
    """Return the topic with the most of its words; None if fewer than two words, or at a tie."""
    text = " ".join(turn["content"] for turn in row["turns"]).lower()
    words = [word.removesuffix("s") for word in re.findall("[a-z]+", text)]
    counts = sorted((sum(map(stems.__contains__, words)), name) for name, stems in _STEMS.items())
    (second, _), (first, name) = counts[-2:]
    return name if first >= 2 and first > second else None


_STEMS = {
    name: {word.removesuffix("s") for word in words.split()} for name, words in _TOPICS.items()
}


def _asks_about(topic: str) -> _Belongs:
    return lambda row: len(row["turns"][-1]["content"]) > _LONG_ANSWER and _topic(row) == topic


_SERVICES = {
    "travel": ("Flights", "Hotels", "Travel", "Buses", "RentalCars"),
    "leisure": ("Events", "Movies", "Music", "Media", "Restaurants", "RideSharing"),
    "errands": ("Banks", "Homes", "Services", "Weather", "Alarm"),
}
"""Services in ``sgd_dev`` that each simulated user asks for."""


def _mostly_uses(name: str) -> _Belongs:
    def belongs(row: Mapping[str, Any]) -> bool:
        used = [service.split("_")[0] for service in row["services"]]
        counts = {who: sum(map(of.__contains__, used)) for who, of in _SERVICES.items()}
        return max(counts, key=counts.__getitem__) == name  # at a tie, the first wins

    return belongs


_SKILLS = {
    "follows": ("CM", "SI", "AR", "TS", "CC"),
    "adapts": ("CR", "FR", "SC", "SA", "MR", "GR", "IC", "PI"),
}
"""Tasks of MT-Bench-101 by user: tasks of perception of the conversation, and the others."""


def _has_task(tasks: tuple[str, ...]) -> _Belongs:
    return lambda row: row["id"].split("-")[0] in tasks


_CLOUDS = {
    "gpt-4": "gpt4",
    "gpt-4-turbo": "gpt4_1106_preview",
    "gpt-4o": "gpt-4o-2024-05-13",
    "claude-2": "claude-2.1",
    "claude-3.5": "claude-3-5-sonnet-20240620",
    "gemini": "gemini-pro",
}


def _answered_by(model: str) -> _Belongs:
    return lambda row: row["model"] == model


USERS: Mapping[str, tuple[str, _Belongs]] = {
    **{f"topic-{topic}": ("alpaca_a", _asks_about(topic)) for topic in _TOPICS},
    "topic-roleplay": ("gpteacher_roleplay", lambda _: True),
    **{f"turns-{who}": ("sgd_dev", _mostly_uses(who)) for who in _SERVICES},
    **{f"turns-{who}": ("mtbench101", _has_task(tasks)) for who, tasks in _SKILLS.items()},
    **{
        f"cloud-{who}": ("alpaca_eval_cloud", _answered_by(model)) for who, model in _CLOUDS.items()
    },
}
"""Data set of each user, and a test of which conversations are the user's, by user name."""
