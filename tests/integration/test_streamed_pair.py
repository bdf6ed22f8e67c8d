"""Two streamed models answer at once at changing levels; each gives the answers it gives alone."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import threading

import numpy as np
import pytest
from budgets import is_streamed, make_room, squeeze
from elastic_models import shuffled
from llama_cpp import Llama
from packed_models import pack
from soak import scale
from switching import ask

from llmaas_hooks import serving_context
from llmaas_plugins import activate, elastic

SETTINGS = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "n_ubatch": 1, "verbose": False}
RNG = np.random.default_rng(11)
START = {name: RNG.integers(300, 4000, 30).tolist() for name in "ab"}
LEVELS = {
    "a": [{"level": 1.0}, {"level": 0.5}, {"prefill": 0.3, "decode": 0.8}, {"level": 0.5}],
    "b": [{"level": 0.3}, {"prefill": 0.8}, {"level": 1.0}, {"decode": 0.4}],
}
"""Requests of each turn with a context; a restart comes after the second turn."""
N_TURNS, N_BEFORE, N_SAID = 4, 2, 3
ENDINGS = [RNG.integers(300, 4000, 7).tolist() for _ in range(N_TURNS)]
PLUGINS = {
    "kv_chunks": {"codec": "lossless", "recompute": False, "parked_tokens": 0},
    "flash_weights": {"memory_budget": "1 MiB", "arena": "1 MiB"},
    "elastic": {},
}

ROOM_FOR_CHUNKS = 6
"""MiB beyond the least budget: kv_chunks serves no context without room for its buffers."""


@pytest.fixture(scope="session")
def reference_model(packaged_model):
    """Return the packaged model, which has enough weights to stream."""
    return packaged_model


class Talk:
    """An app's conversation with a model in several contexts.

    Attributes:
        texts: Tokens of each context.
        said: Tokens and the bytes of their logits, by context and turn.
    """

    def __init__(self, has_levels):
        self.has_levels = has_levels
        self.texts = {name: list(tokens) for name, tokens in START.items()}
        self.said = {}

    def turn(self, llama, name, i):
        level = elastic.level(**LEVELS[name][i]) if self.has_levels else contextlib.nullcontext()
        with level, serving_context(f"{llama.model_path} {name}"):
            tokens, logits = ask(llama, self.texts[name], N_SAID)
        self.texts[name] += [*tokens[:-1], *ENDINGS[i]]  # the last one was not evaluated
        self.said[name, i] = tokens, logits.tobytes()


def alone(model, has_levels):
    """Return a model's answers with nothing in between."""
    talk = Talk(has_levels)
    with (
        activate({"on_error": "raise", "plugins": {"elastic": {}}}),
        contextlib.closing(Llama(str(model), **SETTINGS)) as llama,
    ):
        for name in START:
            llama.reset()
            for i in range(N_TURNS):
                talk.turn(llama, name, i)
    return talk.said


@pytest.fixture(scope="module")
def models(reference_model, tmp_path_factory):
    """Return three packed models, two of them with levels, and each one's answers."""
    folder = tmp_path_factory.mktemp("pair")
    paths = [shuffled(reference_model, folder / f"{seed}.gguf", seed) for seed in range(2)]
    paths.append(shutil.copyfile(reference_model, folder / "plain.gguf"))
    for path in paths:
        pack(path)
    return [(path, alone(path, path != paths[-1])) for path in paths]


def opened(stack, flash, model):
    make_room(flash)
    llama = stack.enter_context(contextlib.closing(Llama(str(model), **SETTINGS)))
    squeeze(flash, ROOM_FOR_CHUNKS)
    return llama


def live(config, models, talks, turns):
    """Let every model answer on a thread of its own; return the status."""
    with contextlib.ExitStack() as stack:
        suite = stack.enter_context(activate({"on_error": "raise", "plugins": config}))
        flash, problems = suite.plugin("flash_weights"), []
        llamas = [opened(stack, flash, model) for model in models]

        def work(llama, talk):
            try:
                for i in turns:
                    for name in START:
                        talk.turn(llama, name, i)
            except BaseException as error:
                problems.append(error)

        pairs = zip(llamas, talks, strict=True)
        threads = [threading.Thread(target=work, args=pair) for pair in pairs]
        for thread in threads:
            thread.start()
        for n_more in itertools.cycle(range(3)):
            squeeze(flash, ROOM_FOR_CHUNKS + n_more)
            if not any(thread.is_alive() for thread in threads):
                break
            threads[0].join(0.02)
        assert problems == []
        return suite.status()


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("other", [1, 2], ids=["both with levels", "one with levels"])
def test_two_streamed_models_answer_at_once(models, tmp_path, other):
    (first, expected), (second, others) = models[0], models[other]
    for n in range(scale(1, 20)):
        config = PLUGINS | {"kv_chunks": PLUGINS["kv_chunks"] | {"store": str(tmp_path / f"kv{n}")}}
        talks = [Talk(has_levels=True), Talk(has_levels=other == 1)]
        for turns in (range(N_BEFORE), range(N_BEFORE, N_TURNS)):
            status = live(config, [first, second], talks, turns)
            assert status["errors"] == {}
            assert all(map(is_streamed, status["plugins"]["flash_weights"]["models"]))
            assert status["plugins"]["kv_chunks"]["restores"] > 0
        assert [talk.said for talk in talks] == [expected, others]
        assert set(status["plugins"]["elastic"]["tokens"]) >= {"0.3", "0.4", "0.5", "0.8", "1.0"}
        assert status["plugins"]["kv_chunks"]["disk_hits"] > 0
