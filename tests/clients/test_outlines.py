"""outlines, unmodified: it edits logits, and resets the ``Llama`` after each reply."""

from __future__ import annotations

from typing import Literal

import pytest
from pydantic import BaseModel

pytestmark = pytest.mark.compat("clients", "outlines", "same as vanilla", "yes")
GREEDY = {"temperature": 0.0, "max_tokens": 60}
BRIEF = {"temperature": 0.0, "max_tokens": 8}


class Flight(BaseModel):
    city: Literal["Rome", "Oslo"]
    seat: Literal["aisle", "window"]


def cell(column, says="yes"):
    return pytest.mark.compat("clients", "outlines", column, says)


@pytest.fixture
def outlines():
    pytest.importorskip("numba")
    return pytest.importorskip("outlines")


@pytest.mark.slow
@cell("completion")
def test_text(lives, outlines, opened, subjects):
    def app():
        texts = list(subjects)
        with opened() as llama:
            model = outlines.from_llamacpp(llama, chat_mode=False)
            for _ in range(2):
                texts = [text + model(text, **BRIEF) for text in texts]
        return texts

    run = lives(app)
    assert min(run.restored) > 0


@cell("chat")
@cell("contexts restored")
def test_two_conversations(lives, outlines, opened, subjects):
    from outlines.inputs import Chat

    def app():
        chats = [Chat([{"role": "user", "content": subject}]) for subject in subjects]
        with opened() as llama:
            model = outlines.from_llamacpp(llama)
            for _ in range(2):
                for chat in chats:
                    chat.add_assistant_message(model(chat, **BRIEF))
                    chat.add_user_message("Why is that?")
        return [message["content"] for chat in chats for message in chat.messages]

    run = lives(app)
    assert min(run.restored) > 0


@cell("streaming")
@cell("cancel")
def test_stream(lives, outlines, opened, subjects):
    def app():
        found = []
        with opened() as llama:
            model = outlines.from_llamacpp(llama)
            for n_pieces in (3, 9, 60):
                for subject in subjects:
                    stream = model.stream(subject, **BRIEF)
                    pieces = zip(range(n_pieces), stream, strict=False)
                    found.append([piece for _, piece in pieces])
                    stream.close()
        return found

    run = lives(app)
    assert len(run.result[0]) == 3 < len(run.result[-1])
    assert min(run.restored) > 0


@pytest.mark.slow
@cell("grammar / JSON")
def test_constraints(lives, outlines, opened, subjects):
    time = outlines.types.Regex(r"\d\d:\d\d")

    def app():
        with opened() as llama:
            model = outlines.from_llamacpp(llama)
            return [
                model(subject, wanted, **GREEDY)
                for subject in subjects
                for wanted in (Flight, time, Literal["yes", "no"])
            ]

    run = lives(app)
    assert all(Flight.model_validate_json(text) for text in run.result[::3])
    assert {text[2:3] for text in run.result[1::3]} == {":"}
    assert set(run.result[2::3]) <= {"yes", "no"}
    assert min(run.restored) > 0
