"""Ways to open a model: GPU offload, old bindings, several files."""

from __future__ import annotations

import contextlib
import ctypes

import llama_cpp
import pytest
from llama_cpp import llama_cpp as bindings
from switching import OTHER, PROMPT, Conversation, ask

REASON = "layers are offloaded to a GPU: this is not tested"


@pytest.fixture
def gpu(monkeypatch):
    """Simulate a build that could offload; the engine computes as usual."""
    monkeypatch.setattr(bindings, "llama_supports_gpu_offload", lambda: True)


def answers(path, **settings):
    with Conversation(path, settings).open() as llama:
        return [ask(llama, prompt, 4)[0] for prompt in (PROMPT, OTHER, PROMPT)]


@pytest.mark.parametrize("n_gpu_layers", [1, -1])
@pytest.mark.usefixtures("gpu")
def test_offloaded_layers_are_left_alone(family, suite, report, n_gpu_layers):
    expected = answers(family("llama"))
    active = suite()
    assert answers(family("llama"), n_gpu_layers=n_gpu_layers) == expected
    found = report(active)
    assert found["left_alone"] == [f"llama.gguf: {REASON}"]
    assert (found["saves"], found["store"]) == (0, None)


@pytest.mark.usefixtures("gpu")
def test_a_gpu_that_is_not_used_does_not_matter(family, suite, report):
    active = suite()
    answers(family("llama"), n_gpu_layers=0)
    found = report(active)
    assert (found["left_alone"], found["restores"]) == ([], 1)


@pytest.mark.usefixtures("gpu")
def test_a_model_opened_before_the_activation_may_be_offloaded(family, suite, report):
    with Conversation(family("llama")).open() as llama:
        active = suite()
        assert n_sequences(llama.model) == 1
        assert report(active)["left_alone"] == [f"a model: {REASON}"]


REAL = (llama_cpp.llama_n_seq_max,)


def n_sequences(model, make=None):
    """Return the actual number of sequences of a new context on ``model``."""
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = 256
    ctx = (make or llama_cpp.llama_init_from_model)(model, params)
    found = REAL[0](ctx)
    llama_cpp.llama_free(ctx)
    return found


def load(name, path, params):
    if name == "llama_model_load_from_splits":
        return llama_cpp.llama_model_load_from_splits((ctypes.c_char_p * 1)(path), 1, params)
    return getattr(llama_cpp, name)(path, params)


LOADERS = (
    "llama_model_load_from_file",
    "llama_load_model_from_file",
    "llama_model_load_from_splits",
)


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.usefixtures("gpu")
@pytest.mark.filterwarnings("ignore:llama_.* is deprecated:DeprecationWarning")
def test_every_loader_tells_how(family, suite, report, name):
    active = suite()
    for n_gpu_layers, n_expected in ((0, 2), (3, 1)):
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        model = load(name, str(family("llama")).encode(), params)
        params.n_gpu_layers = 7  # the app's own structure, for its next model
        assert n_sequences(model) == n_expected
        assert n_sequences(model, llama_cpp.llama_new_context_with_model) == n_expected
        (llama_cpp.llama_free_model if n_gpu_layers else llama_cpp.llama_model_free)(model)
    assert report(active)["left_alone"] == [f"llama.gguf: {REASON}"]


def test_a_model_that_cannot_be_opened_is_none_as_ever(tmp_path, suite):
    suite()
    params = llama_cpp.llama_model_default_params()
    assert llama_cpp.llama_model_load_from_file(str(tmp_path / "no.gguf").encode(), params) is None


def test_handles_may_be_ctypes_objects(family, suite):
    """Applications wrap addresses, as C does."""
    suite()
    with Conversation(family("llama")).open() as llama, contextlib.ExitStack() as stack:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = 256
        ctx = llama_cpp.llama_init_from_model(ctypes.c_void_p(llama.model), params)
        stack.callback(llama_cpp.llama_free, ctypes.c_void_p(ctx))
        assert llama_cpp.llama_n_seq_max(ctypes.c_void_p(ctx)) == 1
        tokens = (llama_cpp.llama_token * 3)(1, 400, 401)
        batch = llama_cpp.llama_batch_get_one(tokens, 3)
        assert llama_cpp.llama_decode(ctypes.c_void_p(ctx), batch) == 0
        memory = ctypes.c_void_p(llama_cpp.llama_get_memory(ctx))
        assert llama_cpp.llama_memory_seq_pos_max(memory, 0) == 2
