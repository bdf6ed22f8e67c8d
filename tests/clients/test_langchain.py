"""LangChain's ``ChatLlamaCpp``, unmodified."""

from __future__ import annotations

import contextlib
from typing import Literal

import pytest
from pydantic import BaseModel

pytest.importorskip("langchain_core")

pytestmark = [
    pytest.mark.slow,  # its import takes a second
    pytest.mark.filterwarnings("ignore:.*langchain-community.*:DeprecationWarning"),
    pytest.mark.compat("clients", "LangChain ChatLlamaCpp", "same as vanilla", "yes"),
]


def cell(column, says="yes"):
    return pytest.mark.compat("clients", "LangChain ChatLlamaCpp", column, says)


@pytest.fixture
def chat_model(engine, reference_model):
    """Return a function that makes the model as an app does; closed afterwards."""
    community = pytest.importorskip("langchain_community.chat_models")

    @contextlib.contextmanager
    def make(model_kwargs=None, **options):
        options = {"temperature": 0.0, "max_tokens": 12} | options
        model = community.ChatLlamaCpp(
            model_path=str(reference_model),
            verbose=False,
            model_kwargs=engine | (model_kwargs or {}),
            **options,
        )
        with contextlib.closing(model.client):
            yield model

    return make


@cell("chat")
@cell("contexts restored")
@pytest.mark.parametrize("streaming", [False, True])
def test_two_conversations(lives, chat_model, streaming, subjects):
    from langchain_core.messages import HumanMessage

    def app():
        conversations = [[HumanMessage(subject)] for subject in subjects]
        with chat_model(streaming=streaming) as model:
            for turn in ("Why is that?", "What now?"):
                for messages in conversations:
                    messages += [model.invoke(messages), HumanMessage(turn)]
        return [message.content for messages in conversations for message in messages]

    run = lives(app)
    assert min(run.restored) > 0


@cell("streaming")
def test_stream(lives, chat_model, subjects):
    def app():
        with chat_model() as model:
            return [[c.content for c in model.stream(subject)] for subject in subjects * 2]

    run = lives(app)
    assert min(len(pieces) for pieces in run.result) > 5
    assert min(run.restored) > 0


@cell("cancel")
def test_stream_left_early(lives, chat_model, subjects):
    def app():
        with chat_model(max_tokens=200) as model:
            found = []
            for n_pieces in (1, 4, 9):
                for subject in subjects:
                    stream = model.stream(subject)
                    found.append([next(stream).content for _ in range(n_pieces)])
                    stream.close()
        return found

    run = lives(app)
    assert min(run.restored) > 0


class Flight(BaseModel):
    """Book a flight."""

    city: Literal["Rome", "Oslo"]
    seat: Literal["aisle", "window"]


@cell("tools")
def test_a_forced_tool(lives, chat_model, subjects):
    def app():
        kwargs = {"chat_format": "chatml-function-calling"}
        choice = {"type": "function", "function": {"name": "Flight"}}
        with chat_model(kwargs, max_tokens=80, streaming=False) as model:
            bound = model.bind_tools([Flight], tool_choice=choice)
            replies = [bound.invoke(subject) for subject in subjects * 2]
        return [(call["name"], call["args"]) for reply in replies for call in reply.tool_calls]

    run = lives(app)
    assert [name for name, _ in run.result] == ["Flight"] * 4
    assert all(Flight(**args) for _, args in run.result)
    assert min(run.restored) > 0


@cell("grammar / JSON")
def test_structured_output(lives, chat_model, subjects):
    def app():
        with chat_model(max_tokens=80) as model:
            return [model.with_structured_output(Flight).invoke(s) for s in subjects * 2]

    run = lives(app)
    assert {type(flight) for flight in run.result} == {Flight}
    assert min(run.restored) > 0


@pytest.mark.compat("clients", "LangChain LlamaCpp", "completion", "yes")
@pytest.mark.compat("clients", "LangChain LlamaCpp", "streaming", "yes")
@pytest.mark.compat("clients", "LangChain LlamaCpp", "contexts restored", "yes")
@pytest.mark.compat("clients", "LangChain LlamaCpp", "same as vanilla", "yes")
def test_the_model_of_texts(lives, engine, reference_model, subjects):
    community = pytest.importorskip("langchain_community.llms")

    fields = community.LlamaCpp.model_fields  # other parameters belong into `model_kwargs`
    options = {key: value for key, value in engine.items() if key in fields}
    others = {key: value for key, value in engine.items() if key not in fields}
    options |= {"temperature": 0.0, "max_tokens": 8, "model_kwargs": others}

    def app():
        model = community.LlamaCpp(model_path=str(reference_model), **options)
        texts = list(subjects)
        with contextlib.closing(model.client):
            for _ in range(2):
                texts = [text + model.invoke(text) for text in texts]
            return texts, ["".join(model.stream(text)) for text in subjects]

    run = lives(app)
    assert min(run.restored) > 0
