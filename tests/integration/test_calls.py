"""Hooks on single engine calls, deferred work, and behavior that stays vanilla."""

from __future__ import annotations

import threading
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from llama_cpp import llama_cpp as bindings

from llmaas_hooks import KVRestored, Levels, RequestScope, hookimpl, serving_context
from llmaas_hooks.request_scope import at_levels, without
from llmaas_plugins import activate

PROMPT = [1, 400, 401, 402, 403, 404]


def greedy(llama, n=8):
    generator = llama.generate(PROMPT, temp=0.0)
    found = [next(generator) for _ in range(n)]
    generator.close()
    return found


def plugin_with(**hooks):
    """Return a plugin object from functions named after hooks; each takes the hook's argument."""
    return type("Plugin", (), {name: hookimpl(hook) for name, hook in hooks.items()})()


def run_vanilla(make_llama):
    llama = make_llama()
    tokens = greedy(llama)
    state = llama.save_state()
    return tokens, state.llama_state, state.input_ids[: state.n_tokens].tolist()


def test_nothing_enabled_is_byte_identical(make_llama):
    vanilla = run_vanilla(make_llama)
    with activate({}):
        assert run_vanilla(make_llama) == vanilla
    assert run_vanilla(make_llama) == vanilla


def test_observers_change_no_byte(make_llama, patched):
    vanilla = run_vanilla(make_llama)

    def decode(self, step): ...
    def logits(self, view): ...
    def save(self, request): ...

    patched(p=plugin_with(llmaas_decode=decode, llmaas_logits=logits, llmaas_kv_save=save))
    assert run_vanilla(make_llama) == vanilla


def test_hook_llmaas_model_load(make_llama, patched, reference_model):
    seen = []

    def load(self, load):
        seen.append((Path(load.path), load.params.vocab_only))
        load.params.vocab_only = True

    patched(p=plugin_with(llmaas_model_load=load))
    assert make_llama().n_embd() == 0  # the weights' sizes were never read
    assert seen == [(reference_model, False)]


def test_hook_llmaas_context_create(make_llama, patched):
    engines = []

    def create(self, create):
        assert create.params.n_seq_max == 1
        create.params.n_seq_max, create.params.kv_unified = 3, True

    def begin(self, request):
        engines.append(request.engine)

    patched(p=plugin_with(llmaas_context_create=create, llmaas_request_begin=begin))
    llama = make_llama()
    greedy(llama)
    assert engines[0].n_seq_max == 3  # the actual setting of the context
    assert bindings.llama_n_seq_max(llama.ctx) == llama_cpp.llama_n_seq_max(llama.ctx) == 1
    assert llama.context_params.n_seq_max == 1  # the app's own structure
    assert not llama.context_params.kv_unified
    assert llama.n_ctx() == 256


def test_hook_llmaas_context_create_tells_how_the_model_was_opened(
    make_llama, patched, reference_model
):
    seen = []
    earlier = make_llama()
    patched(p=plugin_with(llmaas_context_create=lambda self, create: seen.append(create.load)))
    make_llama(use_mmap=False)
    assert Path(seen[0].path) == reference_model
    assert seen[0].params.load_mode == bindings.LLAMA_LOAD_MODE_NONE
    params = bindings.llama_context_default_params()
    bindings.llama_free(bindings.llama_init_from_model(earlier.model, params))
    assert seen[1] is None


def test_hook_llmaas_context_free(make_llama, patched):
    """The hook runs while the context still exists, whether the app closes or drops ``Llama``."""
    freed = []

    def free(self, ctx):
        freed.append((ctx, bindings.llama_n_batch(ctx)))

    patched(p=plugin_with(llmaas_context_free=free))
    first, second = make_llama(n_batch=32), make_llama(n_batch=64)
    addresses = int(first.ctx), int(second.ctx)
    second.close()
    assert freed == [(addresses[1], 64)]
    second.close()
    first.close()
    assert freed == [(addresses[1], 64), (addresses[0], 32)]


@pytest.mark.parametrize("accepts", [True, False])
def test_hook_llmaas_context_create_may_look_at_what_came_of_it(make_llama, patched, accepts):
    contexts, engines = [], []

    def create(self, create):
        def check(ctx):
            contexts.append(ctx)
            return accepts

        create.params.n_seq_max, create.params.kv_unified = 3, True
        create.checks.append(check)

    def begin(self, request):
        engines.append(request.engine)

    patched(p=plugin_with(llmaas_context_create=create, llmaas_request_begin=begin))
    llama = make_llama()
    greedy(llama)
    assert len(contexts) == 1
    assert engines[0].n_seq_max == (3 if accepts else 1)
    assert bindings.llama_n_seq_max(llama.ctx) == 1


def test_hook_llmaas_context_create_cannot_keep_an_app_from_its_context(make_llama, patched):
    def create(self, create):
        create.params.n_seq_max = 10_000  # more than llama.cpp allows
        create.checks.append(lambda ctx: True)

    patched(p=plugin_with(llmaas_context_create=create))
    assert len(greedy(make_llama())) == 8


def test_the_apps_own_n_seq_max_is_what_it_reads(make_llama, patched):
    patched()
    llama = make_llama(embedding=True)
    asked = llama.context_params.n_seq_max
    assert bindings.llama_n_seq_max(llama.ctx) == asked > 1


def test_context_hook_that_fails_is_logged(make_llama, patched, caplog):
    def create(self, create):
        raise OSError("no store")

    patched(p=plugin_with(llmaas_context_create=create), on_error="log")
    assert len(greedy(make_llama())) == 8
    assert "plugin 'p' failed in llmaas_context_create: OSError: no store" in caplog.text


def test_hook_llmaas_app_batch(make_llama, patched):
    """Requests and plugins' own batches are no batches of the app's own."""
    batches = []

    def batch(self, ctx, scope):
        batches.append((ctx, scope))

    def restore(self, request):
        memory = bindings.llama_get_memory(request.engine.ctx)
        bindings.llama_memory_clear(memory, True)
        request.engine.llama._ctx.decode(request.engine.llama._batch)
        bindings.llama_memory_clear(memory, True)
        return KVRestored(0, 0)

    patched(p=plugin_with(llmaas_app_batch=batch, llmaas_kv_restore=restore))
    llama = make_llama()
    llama.eval(PROMPT)
    with serving_context("chat-1", "mail"), at_levels(Levels(0.5)):
        greedy(llama, 3)
        llama.reset()
        with at_levels(Levels(decode=0.8)), without("knn_lm"):
            llama.eval(PROMPT)
    expected = [
        RequestScope(),
        RequestScope("chat-1", "mail", levels=Levels(0.5)),
        RequestScope("chat-1", "mail", frozenset({"knn_lm"}), Levels(0.5, 0.8)),
    ]
    assert batches == [(llama.ctx, scope) for scope in expected]


def test_hook_llmaas_decode(make_llama, patched):
    steps = []
    patched(p=plugin_with(llmaas_decode=lambda self, step: steps.append(step)))
    llama = make_llama()
    greedy(llama, 4)
    assert [step.n_tokens for step in steps] == [len(PROMPT), 1, 1, 1]
    assert {step.ctx for step in steps} == {llama.ctx}
    assert all(step.seconds > 0 for step in steps)


def test_hook_llmaas_prefill(make_llama, patched):
    steps = []
    patched(p=plugin_with(llmaas_prefill=lambda self, step: steps.append(step)))
    llama = make_llama()
    greedy(llama, 4)
    assert [step.n_tokens for step in steps] == [len(PROMPT)]
    assert steps[0].ctx == llama.ctx
    assert steps[0].seconds > 0


def test_hook_llmaas_prefill_comes_before_llmaas_decode(make_llama, patched):
    called = []
    hooks = {
        "llmaas_decode": lambda self: called.append("decode"),
        "llmaas_prefill": lambda self: called.append("prefill"),
    }
    patched(p=plugin_with(**hooks))
    greedy(make_llama(), 2)
    assert called == ["prefill", "decode", "decode"]


@pytest.mark.parametrize("hook", ["llmaas_decode", "llmaas_prefill"])
def test_hook_llmaas_decode_only_after_success(make_llama, patched, hook):
    steps = []
    patched(p=plugin_with(**{hook: lambda self, step: steps.append(step)}))
    llama = make_llama(n_ctx=64)
    tokens = (bindings.llama_token * 2)(-5, -5)
    for n_tokens in (1, 2):
        batch = bindings.llama_batch_get_one(tokens, n_tokens)
        assert bindings.llama_decode(llama.ctx, batch) != 0
    assert steps == []


def test_hook_llmaas_logits(make_llama, patched):
    vanilla = greedy(make_llama())
    seen = []

    def edit(self, view):
        seen.append((view.ctx, view.logits.shape, view.logits.dtype))
        view.logits[vanilla[0]] = -np.inf

    patched(p=plugin_with(llmaas_logits=edit))
    llama = make_llama()
    edited = greedy(llama)
    assert vanilla[0] not in edited
    assert seen == [(llama.ctx, (llama.n_vocab(),), np.float32)] * 8


def test_forced_token_is_seen_by_every_sampler(make_llama, patched):
    def force(self, view):
        view.logits[:] = -1e9
        view.logits[500] = 0.0

    patched(p=plugin_with(llmaas_logits=force))
    generator = make_llama().generate(PROMPT, temp=1.0, top_k=40, repeat_penalty=1.3)
    assert [next(generator) for _ in range(4)] == [500] * 4
    generator.close()


class Deferring:
    """Plugin that leaves work behind after each request; the work ends when ``gate`` opens."""

    def __init__(self):
        self.gate = threading.Event()
        self.order = []

    @hookimpl
    def llmaas_kv_save(self, request):
        self.engine = request.engine
        request.engine.defer(self.job)

    def job(self):
        self.gate.wait(5)
        size = bindings.llama_state_seq_get_size(self.engine.ctx, 0)  # does not wait for itself
        self.order.append("job" if size else "nothing")


CALLS = {
    "generate": lambda llama: next(llama.generate([1, 9, 8])),
    "eval": lambda llama: llama.eval([405]),
    "save_state": lambda llama: llama.save_state(),
    "seq state": lambda llama: bindings.llama_state_seq_get_size(llama.ctx, 0),
    "clear": lambda llama: llama._ctx.kv_cache_clear(),
    "seq_rm": lambda llama: llama._ctx.kv_cache_seq_rm(0, 2, -1),
    "pos_max": lambda llama: bindings.llama_memory_seq_pos_max(llama._ctx.memory, 0),
    "star name": lambda llama: llama_cpp.llama_state_get_size(llama.ctx),
    "sample": lambda llama: bindings.llama_sampler_sample(llama._sampler.sampler, llama.ctx, -1),
    "close": lambda llama: llama.close(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_calls_wait_for_deferred_work(make_llama, patched, call):
    plugin = Deferring()
    patched(p=plugin)
    llama = make_llama()
    greedy(llama, 2)
    assert plugin.order == []  # the caller did not wait
    timer = threading.Timer(0.05, plugin.gate.set)
    timer.start()
    call(llama)
    assert plugin.order[:1] == ["job"]
    timer.join()


def test_revert_waits_for_deferred_work(make_llama, patched):
    plugin = Deferring()
    installed = patched(p=plugin)
    greedy(make_llama(), 2)
    threading.Timer(0.05, plugin.gate.set).start()
    installed.revert()
    assert plugin.order == ["job"]


def test_another_engine_does_not_wait(make_llama, patched):
    plugin = Deferring()
    patched(p=plugin)
    busy, free = make_llama(), make_llama()
    greedy(busy, 2)
    free.eval(PROMPT)
    assert plugin.order == []
    plugin.gate.set()


def test_requests_of_two_threads_keep_their_engines(make_llama, patched):
    seen = {}

    def begin(self, request):
        seen[threading.get_ident()] = request.engine.ctx

    patched(p=plugin_with(llmaas_request_begin=begin))
    llamas, found = [make_llama(), make_llama()], {}

    def work(llama):
        found[llama.ctx] = (greedy(llama), seen[threading.get_ident()])

    threads = [threading.Thread(target=work, args=(llama,)) for llama in llamas]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tokens = {tuple(answer) for answer, _ in found.values()}
    assert len(tokens) == 1
    assert all(ctx == engine_ctx for ctx, (_, engine_ctx) in found.items())
