"""Prompt lookup drafts, alone and under instructor: tokens evaluated ahead and rewound."""

from __future__ import annotations

from typing import Literal

import pytest
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from pydantic import BaseModel


class Flight(BaseModel):
    """Book a flight."""

    city: Literal["Rome", "Oslo"]
    seat: Literal["aisle", "window"]


def cells(row, *columns, says="yes"):
    def mark(test):
        for column in reversed(columns):
            test = pytest.mark.compat("clients", row, column, says)(test)
        return test

    return mark


INSTRUCTOR = "instructor"
PLAIN = "Llama with LlamaPromptLookupDecoding"


@pytest.fixture
def drafting(opened):
    """Return a function that makes a ``Llama`` with drafts from its prompt."""
    return lambda **kwargs: opened(
        draft_model=LlamaPromptLookupDecoding(num_pred_tokens=4), **kwargs
    )


@pytest.mark.slow
@cells(PLAIN, "completion", "drafts", "contexts restored", "same as vanilla")
def test_completions(lives, drafting, subjects):
    def app():
        texts = list(subjects)
        with drafting() as llama:
            for _ in range(2):
                texts = [
                    text + llama(text, max_tokens=12, temperature=0.0)["choices"][0]["text"]
                    for text in texts
                ]
        return texts

    run = lives(app)
    assert min(run.restored) > 0


@cells(PLAIN, "streaming", "cancel", "drafts", "same as vanilla")
def test_streams_left_early(lives, drafting, subjects):
    def app():
        found = []
        with drafting() as llama:
            for n_pieces in (2, 7, 30, 7):
                for subject in subjects:
                    stream = llama(subject, max_tokens=40, temperature=0.0, stream=True)
                    pieces = zip(range(n_pieces), stream, strict=False)
                    found.append([piece["choices"][0]["text"] for _, piece in pieces])
                    stream.close()
        return found

    run = lives(app)
    assert min(run.restored) > 0


@pytest.mark.slow
@cells(PLAIN, "logprobs", "drafts", "same as vanilla")
def test_logprobs(lives, drafting, subjects):
    def app():
        with drafting() as llama:
            replies = [
                llama(subject, max_tokens=12, temperature=0.0, logprobs=2)
                for subject in subjects * 2
            ]
        return [reply["choices"][0]["logprobs"] for reply in replies]

    run = lives(app)
    assert min(run.restored) > 0


@pytest.fixture
def instructor():
    return pytest.importorskip("instructor")


@pytest.mark.slow
@cells(INSTRUCTOR, "chat", "drafts", "contexts restored", "same as vanilla")
def test_instructor_without_a_model(lives, drafting, instructor, subjects):
    def app():
        conversations = [[{"role": "user", "content": subject}] for subject in subjects]
        with drafting() as llama:
            create = instructor.patch(create=llama.create_chat_completion_openai_v1)
            for turn in ("Why is that?", "What now?"):
                for messages in conversations:
                    reply = create(messages=messages, max_tokens=8, temperature=0.0)
                    messages.append(
                        reply.choices[0].message.model_dump(include={"role", "content"})
                    )
                    messages.append({"role": "user", "content": turn})
        return conversations

    run = lives(app)
    assert min(run.restored) > 0


@pytest.mark.slow
@cells(INSTRUCTOR, "tools", "drafts", "same as vanilla")
def test_instructor_by_tools(lives, drafting, instructor, subjects):
    options = {"response_model": Flight, "max_tokens": 80, "temperature": 0.0}

    def app():
        with drafting(chat_format="chatml-function-calling") as llama:
            create = instructor.patch(
                create=llama.create_chat_completion_openai_v1, mode=instructor.Mode.TOOLS
            )
            flights = [
                create(messages=[{"role": "user", "content": subject}], **options)
                for subject in subjects * 2
            ]
        return [flight.model_dump() for flight in flights]

    run = lives(app)
    assert all(Flight(**flight) for flight in run.result)
    assert min(run.restored) > 0


@pytest.mark.slow
@cells(INSTRUCTOR, "grammar / JSON", says="fails in vanilla, too")
@cells(INSTRUCTOR, "drafts", "same as vanilla")
def test_instructor_by_json_schema(lives, drafting, instructor, subjects):
    """llama-cpp-python does not know the response format by which instructor requests a schema."""

    def app():
        with drafting() as llama:
            create = instructor.patch(
                create=llama.create_chat_completion_openai_v1, mode=instructor.Mode.JSON_SCHEMA
            )
            found = []
            for subject in subjects * 2:
                messages = [{"role": "user", "content": subject}]
                with pytest.raises(Exception, match="output is incomplete") as failure:
                    create(messages=messages, response_model=Flight, max_tokens=40, temperature=0.0)
                found.append(failure.value.last_completion.choices[0].message.content)
        return found

    run = lives(app)
    assert all("{" not in text for text in run.result)
    assert min(run.restored) > 0
