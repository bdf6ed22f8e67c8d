"""With nothing claimed or subscribed, the engine's results are vanilla's, bit for bit."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest
from claiming import Claimer, native
from llama_cpp import Llama
from soak import scale

from llmaas_plugins.model.quantize import WEIGHTS

PROMPT = list(range(5, 105))
N_GREEDY, N_THREADS = scale((8, 1), (256, 2))
FAMILIES = ("llama", "qwen2", "qwen3", "gemma3", "llama-moe", "phi3")
EVERY = list(itertools.product(FAMILIES, WEIGHTS))
SOME = list(zip(FAMILIES, itertools.cycle(WEIGHTS), strict=False))  # each at least once


def generate(path, listen=None):
    """Return the logits of the whole prompt, and of each greedy token after it."""
    settings = {"n_ctx": 512, "n_threads": N_THREADS, "logits_all": True, "verbose": False}
    with contextlib.closing(Llama(str(path), **settings)) as llama:
        end = listen() if listen else None
        llama.eval(PROMPT)
        while llama.n_tokens < len(PROMPT) + N_GREEDY:
            llama.eval([int(llama.scores[llama.n_tokens - 1].argmax())])
        if end:
            end()
        found = llama.scores[: llama.n_tokens].copy()
    assert np.isfinite(found).all()
    assert found[-1].any()
    return found


@pytest.mark.soak
@pytest.mark.parametrize(("name", "weights"), scale(SOME, EVERY))
def test_bits_of_prompt_and_greedy_tokens_are_vanillas(family, name, weights):
    path = family(name, weights)
    plugin = Claimer()

    def listen():
        return lambda: counted.update(plugin.contexts[0].stats())

    counted = {}
    expected = generate(path)
    with native(plugin=plugin):
        found = generate(path, listen)
    assert np.array_equal(found, expected)
    assert counted["passed"] == counted["graphs"] >= 1 + N_GREEDY
    assert counted["products"] == counted["taps"] == 0


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama-moe"])
def test_taps_change_no_bit(family, name):
    """A tap must also not keep ggml-cpu from fusing an RMS_NORM with the following MUL."""
    path = family(name, "Q4_0")
    plugin = Claimer()
    counted = {}

    def listen():
        context = plugin.contexts[0]
        density, states = context.density(), context.hidden_states("ffn_input", layer=0)
        norms = context.hidden_states("final_norm")

        def end():
            counted.update(context.stats())
            assert density.read(8)[0].all()
            assert len(states.take()) == len(norms.take()) == len(PROMPT) + N_GREEDY

        return end

    expected = generate(path)
    with native(plugin=plugin):
        found = generate(path, listen)
    assert np.array_equal(found, expected)
    assert counted["passed"] == 0
    assert counted["taps"] >= 4 * (1 + N_GREEDY)
