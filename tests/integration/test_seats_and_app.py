"""An app's own calls on an engine while requests lie aside."""

from __future__ import annotations

import ctypes

import pytest
from llama_cpp import llama_cpp
from paired import PROMPTS, Pair

from llmaas_hooks import LlmaasError
from llmaas_hooks.request_scope import serving_context

N = 8


@pytest.fixture
def exact(patched, make):
    """Return two requests on an engine that evaluates even batches token by token."""
    pair = Pair()
    patched(pair=pair)
    pair.llama = make(n_ubatch=1)
    return pair


def check(exact):
    """Check that both requests say what each says alone, and end them."""
    alone = {app: exact.alone(app, N)[0] for app in PROMPTS}
    a = exact.both(N)
    assert {app: alone[app][: len(found)] for app, found in exact.sampled.items()} == exact.sampled
    exact.end(a)


@pytest.mark.parametrize("clears", [True, False])
@pytest.mark.parametrize("most", [1, N])
def test_what_an_app_evaluates_before_its_request_leaves_those_aside_alone(exact, clears, most):
    """As handlers of chats with images do."""
    n_times = 0

    def evaluate():
        nonlocal n_times
        n_times += 1
        if n_times <= most:
            exact.llama.reset()
            if clears:
                exact.llama._ctx.kv_cache_clear()
            exact.llama.eval([9] * (len(PROMPTS["a"]) + 30))

    exact.before_b = evaluate
    check(exact)
    assert n_times > N - 2


def load(llama, state):
    data = (ctypes.c_uint8 * len(state.llama_state)).from_buffer_copy(state.llama_state)
    assert llama_cpp.llama_state_set_data(llama.ctx, data, len(data)) == len(data)


ON_ALL_CELLS = {
    "save_state": lambda llama, _: llama.save_state(),
    "load_state": lambda llama, state: llama.load_state(state),
    "llama_state_get_size": lambda llama, _: llama_cpp.llama_state_get_size(llama.ctx),
    "llama_state_set_data": load,
}


@pytest.mark.parametrize("name", ON_ALL_CELLS)
def test_calls_on_all_cells_are_refused_while_requests_lie_aside(exact, name):
    """They would show an app the cells of others, or replace them."""
    call, n_refused, state = ON_ALL_CELLS[name], 0, exact.llama.save_state()

    def refused():
        nonlocal n_refused
        with pytest.raises(LlmaasError, match=rf"{name} would show or .* of this engine lies? as"):
            call(exact.llama, state)
        n_refused += 1

    exact.before_b = refused
    check(exact)
    assert n_refused > N - 2
    call(exact.llama, state)


def test_a_saved_state_is_that_of_the_request_that_uses_the_engine(exact):
    """Sequence 0 holds the cells of another request, which has ended."""
    expected, llama = exact.alone("b", N)[0], exact.llama
    exact.both(3).close()
    exact.is_together = False
    exact.seats["b"].enter()
    state = llama.save_state()
    said = list(exact.sampled["b"])
    assert next(exact.b) == expected[len(said)]
    exact.b.close()
    llama.reset()
    llama._ctx.kv_cache_clear()
    llama.load_state(state)
    held = [*PROMPTS["b"], *said[:-1]]
    assert llama.input_ids[: llama.n_tokens].tolist() == held
    with serving_context(None, "b"):
        again = llama.generate([*held, said[-1]], temp=0.0)
        assert next(again) == expected[len(said)]
    again.close()


def test_an_app_reads_no_cells_of_a_request_aside(exact):
    sizes = []

    def read():
        sizes.append(llama_cpp.llama_state_seq_get_size(exact.llama.ctx, 0))

    read()
    exact.before_b = read
    check(exact)
    assert len(sizes) > N - 2
    assert len(set(sizes)) == 1  # that of an empty sequence
