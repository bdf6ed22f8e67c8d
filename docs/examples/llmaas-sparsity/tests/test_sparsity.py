"""The counted shares are those of the states themselves, and nothing else changes."""

import contextlib

import numpy as np
import pytest
from llama_cpp import Llama, llama_cpp
from llmaas_hooks import hookimpl
from llmaas_hooks.testing import check_contract, running
from llmaas_patches import install
from llmaas_plugins.reference_model import reference_model_path

from llmaas_sparsity import Sparsity, SparsityConfig

PROMPT = [1, *range(400, 440)]
THRESHOLD = 0.05


class Capture:
    """Keeps what every layer's feed-forward block reads."""

    @hookimpl
    def llmaas_native_context(self, context):
        layers = range(llama_cpp.llama_model_n_layer(context.model))
        self.states = [context.hidden_states("ffn_input", layer=layer) for layer in layers]


def model(n_threads=1):
    threads = {"n_threads": n_threads, "n_threads_batch": n_threads}
    settings = {"n_ctx": 256, "logits_all": True, "verbose": False}
    return contextlib.closing(Llama(str(reference_model_path()), **settings, **threads))


@pytest.fixture
def listen():
    """Switch plugins on; a failing hook fails the test."""
    with contextlib.ExitStack() as stack:

        def start(**plugins):
            return stack.enter_context(running(plugins, install)).hooks

        yield start


def share(states):
    size = np.abs(states)
    largest = size.max(axis=1, keepdims=True)
    return np.mean(size <= np.float32(THRESHOLD) * largest)


def test_the_contract():
    def use(_hooks):
        with model() as llama:
            llama.eval(PROMPT)

    check_contract(Sparsity, {"threshold": THRESHOLD}, use, install)


@pytest.mark.parametrize("n_threads", [1, 3])
def test_shares_are_those_of_the_captured_states(listen, n_threads):
    capture = Capture()
    hooks = listen(sparsity=Sparsity(SparsityConfig(threshold=THRESHOLD)), capture=capture)
    with model(n_threads) as llama:
        for tokens in (PROMPT, [7], [8]):  # a prompt, then tokens one by one
            llama.eval(tokens)
        expected = [share(states.take()) for states in capture.states]
        (shares,) = hooks.status()["sparsity"]["contexts"]
    assert shares == expected
    assert 0 < min(shares) < max(shares) < 1


def test_replies_stay_as_they_are(listen):
    def logits():
        with model() as llama:
            llama.eval(PROMPT)
            return np.array(llama.scores[: len(PROMPT)])

    vanilla = logits()
    listen(sparsity=Sparsity(SparsityConfig()))
    assert np.array_equal(logits(), vanilla)


def test_every_context_has_counters_that_outlive_it(listen):
    hooks = listen(sparsity=Sparsity(SparsityConfig(threshold=1)))
    with model() as first, model():
        first.eval(PROMPT)
        used, unused = hooks.status()["sparsity"]["contexts"]
    assert set(used) == {1.0}  # all of a row is up to its largest value
    assert set(unused) == {None}
    assert hooks.status()["sparsity"]["contexts"] == [used, unused]
