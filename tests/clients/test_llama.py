"""Apps that use ``Llama`` directly: its own caches, and several models in turn as in the server."""

from __future__ import annotations

import contextlib
import tempfile

import pytest
from llama_cpp import LlamaDiskCache, LlamaRAMCache
from llama_cpp.server.model import LlamaProxy
from llama_cpp.server.settings import ModelSettings


def cells(row, *columns):
    def mark(test):
        for column in reversed((*columns, "contexts restored", "same as vanilla")):
            test = pytest.mark.compat("clients", row, column, "yes")(test)
        return test

    return mark


def converse(llama_of, subjects):
    """Hold conversations in turn, each with the ``Llama`` it gets; return their messages."""
    conversations = [[{"role": "user", "content": subject}] for subject in subjects]
    for turn in ("Why is that?", "What now?"):
        for i, messages in enumerate(conversations):
            reply = llama_of(i).create_chat_completion(messages, max_tokens=8, temperature=0.0)
            messages.append(reply["choices"][0]["message"])
            messages.append({"role": "user", "content": turn})
    return conversations


@cells("Llama with LlamaRAMCache", "chat")
def test_ram_cache(lives, opened, subjects):
    def app():
        with opened() as llama:
            llama.set_cache(LlamaRAMCache())
            return converse(lambda _: llama, subjects)

    run = lives(app)
    assert run.restored[1] > 0  # before the restart, the cache had all tokens


@cells("Llama with LlamaDiskCache", "chat")
def test_disk_cache(lives, opened, subjects, tmp_path):
    def app():
        cache = LlamaDiskCache(tempfile.mkdtemp(dir=tmp_path))
        with contextlib.closing(cache.cache), opened() as llama:
            llama.set_cache(cache)
            return converse(lambda _: llama, subjects)

    run = lives(app)
    assert run.restored[1] > 0


def test_a_disk_cache_filled_without_us_and_by_us(lives, opened, subjects, tmp_path):
    def app():
        cache = LlamaDiskCache(str(tmp_path / "cache"))
        with contextlib.closing(cache.cache), opened() as llama:
            llama.set_cache(cache)
            return converse(lambda _: llama, subjects)

    lives(app)


@cells("llama_cpp.server, models in turn", "chat")
def test_models_in_turn(lives, engine, reference_model, subjects):
    settings = engine | {"model": str(reference_model)}

    def app():
        models = [
            ModelSettings(model_alias="a", **settings),
            ModelSettings(model_alias="b", chat_format="chatml", **settings),
        ]
        proxy = LlamaProxy(models)
        found = converse(lambda i: proxy("ab"[i]), subjects)  # this closes the other model
        proxy.free()
        return found

    run = lives(app)
    assert min(run.restored) > 0


PLAIN = "Llama itself"


@cells(PLAIN, "completion")
def test_sampled(lives, opened, subjects):
    def app():
        texts = list(subjects)
        with opened() as llama:
            for seed in range(3):
                sampling = {"temperature": 0.9, "top_p": 0.8, "repeat_penalty": 1.2, "seed": seed}
                texts = [
                    text + llama(text, max_tokens=8, **sampling)["choices"][0]["text"]
                    for text in texts
                ]
        return texts

    run = lives(app)
    assert min(run.restored) > 0


@cells(PLAIN, "completion")
def test_until_the_context_is_full(lives, opened, subjects):
    long = subjects[0] * 10

    def app():
        with opened(n_ctx=256) as llama:
            first = llama(long, max_tokens=None, temperature=0.0)
            llama(subjects[1], max_tokens=8, temperature=0.0)
            replies = [first, llama(long, max_tokens=None, temperature=0.0)]
            with pytest.raises(ValueError, match="exceed context window"):
                llama(long + first["choices"][0]["text"])
        return [(reply["choices"][0]["text"], reply["usage"]["total_tokens"]) for reply in replies]

    run = lives(app)
    assert {n_tokens for _, n_tokens in run.result} == {256}
    assert min(run.restored) > 0


@cells(PLAIN, "completion")
def test_evaluated_and_sampled_by_hand(lives, opened, subjects):
    def app():
        found = []
        with opened() as llama:
            for subject in (*subjects, subjects[0]):
                tokens = llama.tokenize(subject.encode())
                llama.reset()
                llama.eval(tokens)
                for _ in range(8):
                    tokens.append(llama.sample(temp=0.0))
                    llama.eval(tokens[-1:])
                more = llama.generate(llama.tokenize(b" And then?", add_bos=False), reset=False)
                found += [*tokens, *(next(more) for _ in range(4))]
                more.close()
                found += [
                    llama(text, max_tokens=8, temperature=0.0)["choices"] for text in subjects
                ]
        return found

    run = lives(app)
    assert min(run.restored) > 0
