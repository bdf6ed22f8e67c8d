"""The hook point under apps' settings: bit for bit vanilla's results."""

from __future__ import annotations

import contextlib
import ctypes
import threading

import numpy as np
import pytest
from claiming import Claimer, created, decode, evaluate, loaded, native
from llama_cpp import Llama
from llama_cpp import llama_cpp as raw

AUTO, OFF, ON = -1, 0, 1
F16, Q8_0 = 1, 8
MODES = {
    name.removeprefix("LLAMA_LOAD_MODE_").lower(): getattr(raw, name)
    for name in dir(raw)
    if name.startswith("LLAMA_LOAD_MODE_")
}


def logits(path, model_settings=None, context_settings=None, *, setup=None, plugin=None):
    """Return logits of a prompt and two more tokens; a plugin's own context must compute them."""
    with (
        loaded(path, **model_settings or {}) as model,
        created(model, **context_settings or {}) as ctx,
    ):
        assert ctx is not None
        if setup:
            setup(model, ctx)
        found = evaluate(ctx)
        if plugin:
            counted = plugin.contexts[-1].stats()
            assert counted["passed"] == counted["graphs"] >= 3
        return found


def assert_identical(path, model_settings=None, context_settings=None, *, setup=None):
    expected = logits(path, model_settings, context_settings, setup=setup)
    plugin = Claimer()
    with native(plugin=plugin):
        found = logits(path, model_settings, context_settings, setup=setup, plugin=plugin)
    assert np.isfinite(found).all()
    assert np.array_equal(found, expected)
    return found


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss"])
def test_flash_attention_off_on_and_auto(family, name):
    found = {
        flash: assert_identical(family(name), {}, {"flash_attn_type": flash})
        for flash in (OFF, ON, AUTO)
    }
    assert not np.array_equal(found[OFF], found[ON])
    assert np.array_equal(found[AUTO], found[ON])  # automatic means on, on a CPU


@pytest.mark.parametrize(
    ("type_k", "type_v", "flash"),
    [(F16, F16, OFF), (Q8_0, F16, OFF), (Q8_0, Q8_0, ON), (F16, Q8_0, ON)],
)
def test_types_of_kv(family, type_k, type_v, flash):
    settings = {"type_k": type_k, "type_v": type_v, "flash_attn_type": flash}
    assert_identical(family("llama"), {}, settings)


@pytest.mark.parametrize("mode", MODES)
def test_load_modes(family, mode):
    with loaded(family("llama"), load_mode=MODES[mode]) as model:
        if model is None:
            pytest.skip(f"this machine cannot load a model with load_mode {mode}")
    assert_identical(family("llama"), {"load_mode": MODES[mode]})


@pytest.mark.parametrize("weights", ["Q4_0", "Q8_0", "Q4_K"])
@pytest.mark.parametrize("repack", [True, False])
def test_repacked_weights_and_plain_ones(family, weights, repack):
    assert_identical(family("llama", weights), {"use_extra_bufts": repack})


@pytest.mark.parametrize("threads", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_threads(family, threads):
    n_threads, n_threads_batch = threads
    settings = {"n_threads": n_threads, "n_threads_batch": n_threads_batch}
    assert_identical(family("qwen3"), {}, settings)


def test_micro_batches(family):
    assert_identical(family("gemma3"), {}, {"n_ubatch": 8})


# -- adapters --------------------------------------------------------------------------------------


def llama_logits(path, **settings):
    with contextlib.closing(
        Llama(str(path), n_ctx=64, n_threads=2, verbose=False, logits_all=True, **settings)
    ) as llama:
        llama.eval(list(range(5, 25)))
        return llama.scores[: llama.n_tokens].copy()


def test_a_lora_given_at_load(family, lora):
    path = family("llama")
    plain = llama_logits(path)
    expected = llama_logits(path, lora_path=str(lora))
    assert not np.array_equal(expected, plain)
    with native(plugin=Claimer()):
        assert np.array_equal(llama_logits(path, lora_path=str(lora)), expected)


def test_a_lora_set_and_taken_off_at_run_time(family, lora):
    def run():
        with loaded(family("llama")) as model, created(model) as ctx:
            adapter = raw.llama_adapter_lora_init(model, str(lora).encode())
            found = [evaluate(ctx)]
            for scale in (1.0, 0.5):
                adapters = (raw.llama_adapter_lora_p_ctypes * 1)(adapter)
                scales = (ctypes.c_float * 1)(scale)
                assert raw.llama_set_adapters_lora(ctx, adapters, 1, scales) == 0
                found.append(evaluate(ctx))
            assert raw.llama_set_adapters_lora(ctx, None, 0, None) == 0
            return [*found, evaluate(ctx)]

    expected = run()
    plugin = Claimer()
    with native(plugin=plugin):
        found = run()
    assert all(map(np.array_equal, found, expected))
    assert np.array_equal(found[0], found[3])
    assert not np.array_equal(found[0], found[1])
    assert not np.array_equal(found[1], found[2])


# -- other uses of a context -----------------------------------------------------------------------


def test_an_apps_eval_callback_gets_its_tensors(family):
    """Graphs are then split, and each piece ends at a node that the app asked for."""
    seen, counts = [], {"asked": 0}

    @raw.ggml_backend_sched_eval_callback
    def every_fifth(tensor, ask, _user):
        if ask:
            counts["asked"] += 1
            return counts["asked"] % 5 == 0
        seen.append(tensor)
        return True

    expected = logits(family("llama"), {}, {"cb_eval": every_fifth})
    n_vanilla, seen[:], counts["asked"] = len(seen), [], 0
    plugin = Claimer()
    with native(plugin=plugin):
        found = logits(family("llama"), {}, {"cb_eval": every_fifth}, plugin=plugin)
    assert np.array_equal(found, expected)
    assert len(seen) == n_vanilla > 3


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_embeddings(family, name):
    def run():
        with contextlib.closing(
            Llama(str(family(name)), n_ctx=64, n_threads=2, verbose=False, embedding=True)
        ) as llama:
            vector = np.array(llama.embed("Where is the library?"))
            return vector, [context.stats() for context in plugin.contexts]

    plugin = Claimer()
    expected, _ = run()
    with native(plugin=plugin):
        found, (counted,) = run()
    assert np.array_equal(found, expected)
    assert counted["passed"] == counted["graphs"] > 0


@pytest.mark.parametrize("is_tapped", [False, True])
@pytest.mark.parametrize("n_calls", [0, 20])
def test_an_abort_callback_stops_the_graph(family, n_calls, is_tapped):
    def run():
        left = [10**9]

        @raw.ggml_abort_callback
        def abort(_user):
            left[0] -= 1
            return left[0] < 0

        settings = {"abort_callback": abort, "n_threads": 1, "n_threads_batch": 1}
        with loaded(family("llama")) as model, created(model, **settings) as ctx:
            if is_tapped and plugin.contexts:
                plugin.contexts[0].density()
            first = decode(ctx, range(5, 25), 0)
            left[0] = n_calls
            stopped = decode(ctx, range(25, 30), 20)
            left[0] = 10**9
            return first, stopped, evaluate(ctx)

    plugin = Claimer()
    expected = run()
    with native(plugin=plugin):
        found = run()
    assert found[:2] == expected[:2] == (0, 2)
    assert np.array_equal(found[2], expected[2])


def test_an_abort_callback_set_later(family):
    @raw.ggml_abort_callback
    def abort(_user):
        return is_on[0]

    is_on = [False]
    with native(plugin=Claimer()), loaded(family("llama")) as model, created(model) as ctx:
        raw.llama_set_abort_callback(ctx, abort, None)
        before = evaluate(ctx)
        is_on[0] = True
        assert decode(ctx, [5], 37) == 2
        is_on[0] = False
        assert np.array_equal(evaluate(ctx), before)


def test_native_and_vanilla_contexts_of_two_models_interleave(family):
    first, second = family("llama"), family("qwen2", "Q4_0")
    expected = {path: logits(path) for path in (first, second)}
    plugin = Claimer()
    with contextlib.ExitStack() as stack:

        def enter(path, model=None):
            model = model or stack.enter_context(loaded(path))
            contexts.append((path, stack.enter_context(created(model))))
            return model

        contexts = []
        before = enter(first)
        stack.enter_context(native(plugin=plugin))
        enter(first, before)
        enter(first)
        model = enter(second)
        enter(second, model)
        for _ in range(2):
            for path, ctx in contexts:
                assert np.array_equal(evaluate(ctx), expected[path])
        assert [context.ctx for context in plugin.contexts] == [int(ctx) for _, ctx in contexts[1:]]
        assert all(context.stats()["graphs"] >= 6 for context in plugin.contexts)


def test_contexts_compute_on_threads_of_their_own(family):
    path = family("llama")
    expected = logits(path)
    found = [[], []]

    def work(ctx, into):
        into.extend(evaluate(ctx) for _ in range(5))

    with native(plugin=Claimer()), loaded(path) as model, created(model) as a, created(model) as b:
        threads = [
            threading.Thread(target=work, args=args) for args in zip((a, b), found, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(np.array_equal(each, expected) for each in found[0] + found[1])
    assert len(found[0]) == len(found[1]) == 5


# -- thread pools ----------------------------------------------------------------------------------


class PoolParams(ctypes.Structure):
    """Structure of ggml's ``ggml_threadpool_params``."""

    _fields_ = (
        ("cpumask", ctypes.c_bool * 512),
        ("n_threads", ctypes.c_int),
        ("prio", ctypes.c_int),
        ("poll", ctypes.c_uint32),
        ("strict_cpu", ctypes.c_bool),
        ("paused", ctypes.c_bool),
    )


@contextlib.contextmanager
def thread_pool(n_threads):
    """Create a thread pool of ggml's."""
    base, cpu = ctypes.CDLL("libggml-base.so.0"), ctypes.CDLL("libggml-cpu.so.0")
    base.ggml_threadpool_params_default.restype = PoolParams
    cpu.ggml_threadpool_new.restype = ctypes.c_void_p
    params = base.ggml_threadpool_params_default(n_threads)
    assert params.n_threads == n_threads  # confirms the layout of our structure
    pool = ctypes.c_void_p(cpu.ggml_threadpool_new(ctypes.byref(params)))
    assert pool
    try:
        yield pool
    finally:
        cpu.ggml_threadpool_free(pool)


@pytest.mark.parametrize("is_tapped", [False, True])
def test_an_attached_thread_pool_computes_the_graphs(family, is_tapped):
    def traces():
        return ctypes.string_at(pool, 256)  # ggml records in a pool what it computes

    path = family("llama")
    expected = logits(path)
    attach = raw._lib.llama_attach_threadpool
    detach = raw._lib.llama_detach_threadpool
    attach.argtypes, detach.argtypes = [ctypes.c_void_p] * 3, [ctypes.c_void_p]
    plugin = Claimer()
    with native(plugin=plugin), loaded(path) as model, created(model) as ctx:
        if is_tapped:
            plugin.contexts[0].density()
        with thread_pool(2) as pool:
            unused = traces()
            assert np.array_equal(evaluate(ctx), expected)
            assert traces() == unused
            attach(ctx, pool, None)
            assert np.array_equal(evaluate(ctx), expected)
            used = traces()
            assert used != unused
            detach(ctx)
            assert np.array_equal(evaluate(ctx), expected)
            assert traces() == used
        assert np.array_equal(evaluate(ctx), expected)  # the freed pool is no longer used
        assert plugin.contexts[0].stats()["graphs"] >= 12
