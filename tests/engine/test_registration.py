"""The backend is registered in ggml once while a native plugin is on, and at no other time."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import resource
import subprocess
import sys
import threading
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from claiming import (
    Claimer,
    created,
    evaluate,
    in_a_process,
    loaded,
    n_engines,
    native,
    opened,
    vanilla,
)
from matrices import DOWN
from soak import scale

from llmaas_hooks import WeightClaim
from llmaas_patches.native import load_library

REFUSED = {"type_v": llama_cpp.GGML_TYPE_Q8_0, "flash_attn_type": 0}
"""Settings that llama.cpp refuses before it creates a backend."""


@pytest.fixture
def model(family):
    """Return the path of a small model."""
    return family("llama")


@functools.cache
def ggml():
    """Return the ggml that libllama uses."""
    library = ctypes.CDLL("libggml.so.0")
    for name in ("reg_count", "dev_count"):
        getattr(library, f"ggml_backend_{name}").restype = ctypes.c_size_t
    for name in ("reg_get", "reg_by_name", "reg_get_proc_address", "dev_get"):
        getattr(library, f"ggml_backend_{name}").restype = ctypes.c_void_p
    for name in ("reg_name", "dev_name"):
        getattr(library, f"ggml_backend_{name}").restype = ctypes.c_char_p
    return library


def registry():
    """Return ggml's registered backends and devices, and the function that sets pools."""
    library = ggml()
    backends = [
        library.ggml_backend_reg_name(ctypes.c_void_p(library.ggml_backend_reg_get(size)))
        for size in map(ctypes.c_size_t, range(library.ggml_backend_reg_count()))
    ]
    devices = [
        library.ggml_backend_dev_name(ctypes.c_void_p(library.ggml_backend_dev_get(size)))
        for size in map(ctypes.c_size_t, range(library.ggml_backend_dev_count()))
    ]
    cpu = ctypes.c_void_p(library.ggml_backend_reg_by_name(b"CPU"))
    asked = b"ggml_backend_cpu_set_threadpool"
    return backends, devices, library.ggml_backend_reg_get_proc_address(cpu, asked)


@pytest.fixture
def untouched():
    """Return ggml's registry; assert that the test leaves it unchanged."""
    before = registry()
    assert b"LLMAAS" not in before[0] + before[1]
    yield before
    assert registry() == before
    assert n_engines() == 0
    assert not load_library().lib.llmaas_backend_registered()


def is_there_once(untouched):
    backends, devices, set_pool = registry()
    assert sorted(backends) == sorted([*untouched[0], b"LLMAAS"])
    assert sorted(devices) == sorted([*untouched[1], b"LLMAAS"])
    assert set_pool != untouched[2]
    assert load_library().lib.llmaas_backend_registered()
    return True


WITHOUT = """
import sys
from claiming import opened, evaluate, native
from llmaas_hooks import hookimpl

class Other:
    @hookimpl
    def llmaas_decode(self, step):
        pass

with native(other=Other()), opened(sys.argv[1]) as ctx:
    evaluate(ctx)
    with open("/proc/self/maps") as maps:
        print("libllmaas_ggml" in maps.read(), "llmaas_patches.native._ffi" in sys.modules)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_without_a_native_plugin_the_library_is_not_loaded(model):
    done = in_a_process(WITHOUT, model, start=subprocess.run)  # nothing is imported before
    assert done.returncode == 0, done.stderr[-1000:]
    assert done.stdout == "False False\n"


def test_it_is_registered_as_long_as_the_activation_whatever_comes_and_goes(model, untouched):
    plugin = Claimer()
    with native(plugin=plugin):
        assert is_there_once(untouched)
        with loaded(model) as llama:
            assert is_there_once(untouched)
            with created(llama) as first:
                assert is_there_once(untouched)
                with created(llama):
                    assert is_there_once(untouched)
                    assert n_engines() == 2
                assert is_there_once(untouched)
                evaluate(first)
            assert is_there_once(untouched)
            with created(llama), loaded(model) as other, created(other):
                assert is_there_once(untouched)
        assert is_there_once(untouched)
    assert registry() == untouched
    assert len(plugin.contexts) == 4


def test_the_features_of_the_system_are_vanillas(untouched):
    expected = llama_cpp.llama_print_system_info()
    with native(plugin=Claimer()):
        assert llama_cpp.llama_print_system_info() == expected


RACE = """
import sys, threading, llama_cpp
from claiming import Claimer, created, loaded, native

is_over = threading.Event()

def read(function):
    while not is_over.is_set():
        function()

READERS = [  # the first has a buffer, so one thread calls it
    llama_cpp.llama_print_system_info,
    llama_cpp.llama_supports_gpu_offload,
]

with native(plugin=Claimer()), loaded(sys.argv[1]) as llama:
    threads = [threading.Thread(target=read, args=(function,)) for function in READERS]
    for thread in threads:
        thread.start()
    for _ in range(int(sys.argv[2])):
        with created(llama):
            pass
    is_over.set()
    for thread in threads:
        thread.join()
print("survived")
"""


@pytest.mark.slow
@pytest.mark.soak
def test_other_threads_read_the_registry_while_contexts_come_and_go(model):
    done = in_a_process(RACE, model, str(scale(300, 10_000)))
    assert (done.returncode, done.stdout) == (0, "survived\n"), done.stderr[-1000:]


@contextlib.contextmanager
def little_memory():
    """Limit the process to 128 MiB more than it has now."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + (128 << 20), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("claims", [(), (WeightClaim(DOWN, source="tiles"),)], ids=["none", "own"])
def test_a_context_that_cannot_be_created_leaves_nothing(model, untouched, claims):
    plugin = Claimer(*claims)
    with native(plugin=plugin), loaded(model) as llama:
        with created(llama, **REFUSED) as ctx:
            assert ctx is None
        with little_memory(), created(llama, n_ctx=1 << 19) as ctx:  # half a GiB of cells
            assert ctx is None
        assert n_engines() == 0
        assert plugin.contexts == []
        with created(llama) as ctx:
            assert is_there_once(untouched)
            evaluate(ctx)


def test_a_model_that_cannot_be_loaded_leaves_nothing(tmp_path, untouched):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    with native(plugin=Claimer(WeightClaim(DOWN, source="tiles"))):
        for path in (broken, tmp_path / "missing.gguf"):
            with loaded(path) as llama:
                assert llama is None


def test_a_context_outlives_the_suite(model, untouched):
    expected = vanilla(model)
    plugin = Claimer(WeightClaim(DOWN, columns=(64,)))
    with loaded(model) as llama:
        with native(plugin=plugin):
            ours = created(llama)
            ctx = ours.__enter__()
        assert registry()[:2] == untouched[:2]
        assert registry()[2] != untouched[2]  # its engine must still learn of thread pools
        with pytest.raises(ReferenceError):
            plugin.contexts[0].stats()
        assert np.array_equal(evaluate(ctx), expected)
        with created(llama) as plain:  # created without the hooks, so it has no engine
            assert n_engines() == 1
            assert np.array_equal(evaluate(plain), expected)
        ours.__exit__(None, None, None)
        assert registry() == untouched


def test_a_second_activation_works(model, untouched):
    for _ in range(3):
        plugin = Claimer()
        with native(plugin=plugin), opened(model) as ctx:
            evaluate(ctx)
            assert plugin.contexts[0].stats()["graphs"] > 0
            assert is_there_once(untouched)
        assert registry() == untouched


def test_an_activation_takes_over_while_another_ones_context_is_open(model, untouched):
    first, second = Claimer(), Claimer()
    with contextlib.ExitStack() as stack:
        with native(plugin=first):
            stack.enter_context(opened(model))
        with native(plugin=second), opened(model) as ctx:
            assert is_there_once(untouched)
            assert n_engines() == 2
            evaluate(ctx)
            assert second.contexts[0].stats()["graphs"] > 0
        assert registry()[:2] == untouched[:2]
    assert len(first.contexts) == len(second.contexts) == 1


@pytest.mark.slow
@pytest.mark.soak
def test_threads_open_and_close_models_and_contexts(model, untouched):
    expected = vanilla(model)
    plugin, failed = Claimer(WeightClaim(DOWN, columns=(None, 64))), []

    def life(seed):
        random = np.random.default_rng(seed)
        try:
            for _ in range(scale(12, 400)):
                with contextlib.ExitStack() as stack:
                    llama = stack.enter_context(loaded(model))
                    for _ in range(random.integers(1, 4)):
                        ctx = stack.enter_context(created(llama))
                        if random.random() < 0.3:
                            assert np.array_equal(evaluate(ctx), expected)
                    with created(llama, **REFUSED if random.random() < 0.2 else {}):
                        pass
        except BaseException as error:
            failed.append(error)
            raise

    with native(plugin=plugin):
        threads = [threading.Thread(target=life, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failed == []
    assert len(plugin.contexts) >= 4 * scale(12, 400)
