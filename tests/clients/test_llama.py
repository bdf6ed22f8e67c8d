"""What apps do with ``Llama`` itself: its own caches, and several models in turn as the server."""

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
    """Conversations in turn, with the ``Llama`` that each gets; their messages."""
    conversations = [[{"role": "user", "content": subject}] for subject in subjects]
    for turn in ("Why is that?", "I do not believe you.", "What now?"):
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
    assert run.restored[1] > 0  # before the restart, the cache had it all


@cells("Llama with LlamaDiskCache", "chat")
def test_disk_cache(lives, opened, subjects, tmp_path):
    def app():
        cache = LlamaDiskCache(tempfile.mkdtemp(dir=tmp_path))
        with contextlib.closing(cache.cache), opened() as llama:
            llama.set_cache(cache)
            return converse(lambda _: llama, subjects)

    run = lives(app)
    assert run.restored[1] > 0


@cells("llama_cpp.server, models in turn", "chat")
def test_models_in_turn(lives, engine, reference_model, subjects):
    settings = engine | {"model": str(reference_model)}

    def app():
        models = [
            ModelSettings(model_alias="a", **settings),
            ModelSettings(model_alias="b", chat_format="chatml", **settings),
        ]
        proxy = LlamaProxy(models)
        found = converse(lambda i: proxy("ab"[i]), subjects)  # the other one is closed
        proxy.free()
        return found

    run = lives(app)
    assert min(run.restored) > 0
