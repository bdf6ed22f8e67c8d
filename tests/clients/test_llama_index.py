"""llama-index's ``LlamaCPP``, unmodified."""

from __future__ import annotations

import contextlib

import pytest

pytestmark = [
    pytest.mark.slow,  # its import takes a second
    pytest.mark.compat("clients", "llama-index LlamaCPP", "same as vanilla", "yes"),
]


def cell(column, says="yes"):
    return pytest.mark.compat("clients", "llama-index LlamaCPP", column, says)


@pytest.fixture
def llm(engine, reference_model):
    """Return a function that makes the model as an app does; closed afterwards."""
    client = pytest.importorskip("llama_index.llms.llama_cpp")

    @contextlib.contextmanager
    def make(max_new_tokens=12, **kwargs):
        llm = client.LlamaCPP(
            model_path=str(reference_model),
            temperature=0.0,
            max_new_tokens=max_new_tokens,
            model_kwargs=engine | kwargs,
            verbose=False,
        )
        with contextlib.closing(llm._model):
            yield llm

    return make


@cell("completion")
def test_completions(lives, llm, subjects):
    def app():
        texts = list(subjects)
        with llm() as model:
            for _ in range(2):
                texts = [text + model.complete(text, formatted=True).text for text in texts]
        return texts

    run = lives(app)
    assert min(run.restored) > 0


@cell("chat")
@cell("contexts restored")
def test_two_conversations(lives, llm, subjects):
    from llama_index.core.llms import ChatMessage

    def app():
        conversations = [[ChatMessage(role="user", content=subject)] for subject in subjects]
        with llm() as model:
            for turn in ("Why is that?", "What now?"):
                for messages in conversations:
                    messages.append(model.chat(messages).message)
                    messages.append(ChatMessage(role="user", content=turn))
        return [message.content for messages in conversations for message in messages]

    run = lives(app)
    assert min(run.restored) > 0


@cell("streaming")
def test_stream(lives, llm, subjects):
    def app():
        with llm() as model:
            return [[r.delta for r in model.stream_complete(text)] for text in subjects * 2]

    run = lives(app)
    assert min(len(pieces) for pieces in run.result) > 5
    assert min(run.restored) > 0


@cell("cancel")
def test_stream_left_early(lives, llm, subjects):
    def app():
        found = []
        with llm(max_new_tokens=200) as model:
            for n_pieces in (1, 4, 9):
                for text in subjects:
                    stream = model.stream_complete(text)
                    found.append([next(stream).delta for _ in range(n_pieces)])
                    stream.close()
        return found

    run = lives(app)
    assert min(run.restored) > 0


@cell("logprobs")
def test_logprobs(lives, llm, subjects):
    def app():
        with llm(logits_all=True) as model:
            model.generate_kwargs["logprobs"] = 3
            replies = [model.complete(text) for text in subjects * 2]
        return [reply.raw["choices"][0]["logprobs"] for reply in replies]

    run = lives(app)
    assert min(run.restored) > 0
