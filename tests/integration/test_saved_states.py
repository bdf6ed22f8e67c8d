"""States that an app saves and loads: their cells are stored only if their origin is certain."""

from __future__ import annotations

import contextlib

import pytest
from datastores import ENGINE
from llama_cpp import Llama, LlamaRAMCache

from llmaas_plugins import activate

TEXT = "The quick brown fox jumps over the lazy dog and then it runs away. " * 6
LATER = TEXT + "Then"


def opened(model, **settings):
    return contextlib.closing(Llama(str(model), **(ENGINE | settings)))


def ask(llama, text):
    return llama.create_completion(text, max_tokens=8, temperature=0.0)["choices"][0]["text"]


@pytest.fixture
def start(tmp_path):
    """Return a function that activates; a second activation is a new life of the process."""
    table = {"store": str(tmp_path / "kv"), "codec": "lossless", "recompute": False}
    return lambda: activate({"on_error": "raise", "plugins": {"kv_chunks": table}})


def reused(suite):
    return suite.status()["plugins"]["kv_chunks"]["reused_tokens"]


def later(model, start):
    """Return the answer of a new process with the same store, and the tokens that it reused."""
    with start() as suite, opened(model) as llama:
        return ask(llama, LATER), reused(suite)


@pytest.fixture(scope="module")
def expected(light_model):
    with opened(light_model) as llama:
        return ask(llama, LATER)


def test_a_state_of_other_settings_is_not_stored(light_model, start, expected):
    """Cells of another RoPE base have the same shape."""
    with start(), opened(light_model, rope_freq_base=50.0) as other:
        ask(other, TEXT)
        state = other.save_state()
        with opened(light_model) as llama:
            llama.load_state(state)
            ask(llama, TEXT)
    assert later(light_model, start) == (expected, 0)


def test_a_cache_that_two_engines_share_stores_nothing_wrong(light_model, start, expected):
    with start():
        cache = LlamaRAMCache()
        for base in (50.0, 0.0):
            with opened(light_model, rope_freq_base=base) as llama:
                llama.set_cache(cache)
                ask(llama, TEXT)
    answer, n_reused = later(light_model, start)
    assert answer == expected
    assert n_reused == 0


def test_an_engines_own_state_is_stored(light_model, start, expected):
    with start(), opened(light_model) as llama:
        llama.eval(llama.tokenize(TEXT.encode()))
        state = llama.save_state()
        llama.reset()
        llama.load_state(state)
        ask(llama, TEXT)
    answer, n_reused = later(light_model, start)
    assert answer == expected
    assert n_reused > 50
