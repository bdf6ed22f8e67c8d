"""Prompts that go on from the cells: ``Llama`` is given only the rest, and answers as vanilla."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from llama_cpp import Llama
from requested import PROMPT, Recorder
from switching import ask

LONGER = [*PROMPT, 500, 501, 502]


@pytest.fixture
def read(monkeypatch, patched):
    """Yield what ``Llama.generate`` evaluates, and whether it looks for a common prefix first."""
    found, original = [], Llama.generate

    @functools.wraps(original)
    def generate(self, tokens, *args, **kwargs):
        inner = original(self, tokens, *args, **kwargs)

        def recorded():
            found.append((list(tokens), kwargs.get("reset", True)))
            yield from inner

        return recorded()

    monkeypatch.setattr(Llama, "generate", generate)
    patched(recorder=Recorder())
    yield found
    monkeypatch.undo()


def test_a_prompt_that_goes_on_is_not_searched_for(make_llama, read):
    llama = make_llama()
    first, _ = ask(llama, PROMPT, 1)
    ask(llama, LONGER, 1)
    ask(llama, [*LONGER, 7, *first], 1)
    assert read == [(PROMPT, True), ([500, 501, 502], False), ([7, *first], False)]


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:-1], [*PROMPT[:-1], 9, 10], [2, 3]])
def test_other_prompts_are_left_to_llama(make_llama, read, prompt):
    llama = make_llama()
    ask(llama, PROMPT, 1)
    ask(llama, prompt, 1)
    assert read[1:] == [(prompt, True)]


def test_a_verbose_llama_says_what_vanilla_says(make_llama, patched, capfd):
    def said():
        llama = make_llama(verbose=True)
        ask(llama, PROMPT, 1)
        capfd.readouterr()
        ask(llama, LONGER, 1)
        return [line for line in capfd.readouterr().err.splitlines() if "generate" in line]

    expected = said()
    patched(recorder=Recorder())
    assert said() == expected == [expected[0]]


def test_every_bit_is_vanillas(make_llama, patched):
    prompts = [PROMPT, LONGER, [*LONGER, 7, 8, 9], PROMPT, LONGER[:-1]]

    def rows():
        llama = make_llama(n_threads_batch=1)
        return np.concatenate([ask(llama, prompt, 3)[1] for prompt in prompts])

    expected = rows()
    patched(recorder=Recorder())
    assert np.array_equal(rows(), expected)


def test_options_by_place(make_llama, read):
    llama = make_llama()
    ask(llama, PROMPT, 1)
    generator = llama.generate(LONGER, 40, 0.95, 0.05, 1.0, 0.0, 1.0, True)
    token = next(generator)
    generator.close()
    assert read[1:] == [([500, 501, 502], False)]
    assert token == ask(make_llama(), LONGER, 1)[0][0]


def test_a_request_that_resets_nothing_is_left_to_llama(make_llama, read):
    llama = make_llama()
    ask(llama, PROMPT, 1)
    generator = llama.generate([500, 501], temp=0.0, reset=False)
    next(generator)
    generator.close()
    assert read[1:] == [([500, 501], False)]
    assert llama.n_tokens == len(PROMPT) + 2
