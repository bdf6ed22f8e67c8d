"""llama.cpp's quantizer: every matrix has the requested type, or there is no file."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import signal

import llama_cpp
import pytest
from families import write_family
from gguf import GGMLQuantizationType, GGUFReader
from llama_cpp import Llama
from soak import scale

from llmaas_eval.models import SHAPE_TINY, write_random_model
from llmaas_hooks import ConfigError, LlmaasError
from llmaas_plugins.model.quantize import WEIGHTS, quantize

F32, F16 = GGMLQuantizationType.F32, GGMLQuantizationType.F16
FAMILIES = ("llama", "qwen2", "qwen3", "phi3", "gemma3", "llama-moe")
EVERY = [*itertools.product(FAMILIES, WEIGHTS)]
# Rows that are whole blocks of Q4_K are whole blocks of every type.
SOME = sorted({*itertools.product(FAMILIES, ["Q4_K"]), *itertools.product(["llama-moe"], WEIGHTS)})


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Return a function from a family's name to its model in F32."""
    folder = tmp_path_factory.mktemp("originals")
    return functools.cache(lambda name: write_family(name, folder / f"{name}.gguf", weights=F32))


@functools.cache
def types_of_matrices(path):
    """Return the types of all matrices except expert routers, which converters leave F32."""
    matrices = [t for t in GGUFReader(path).tensors if len(t.shape) > 1]
    return {t.name: t.tensor_type.name for t in matrices if "ffn_gate_inp" not in t.name}


@pytest.mark.soak
@pytest.mark.parametrize(("name", "weights"), scale(SOME, EVERY))
@pytest.mark.slow
def test_every_matrix_gets_the_type_and_the_model_runs(original, tmp_path, name, weights):
    path = quantize(original(name), tmp_path / "model.gguf", weights)
    assert types_of_matrices(path) == dict.fromkeys(types_of_matrices(original(name)), weights)
    with contextlib.closing(Llama(str(path), n_ctx=64, logits_all=True, verbose=False)) as llama:
        llama.eval(llama.tokenize(b"Hello"))
        assert llama.scores[: llama.n_tokens].std() > 0
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("weights", [F16, GGMLQuantizationType.BF16])
def test_16_bits_are_as_good_a_source(tmp_path, weights):
    source = write_family("llama", tmp_path / "source.gguf", weights=weights)
    path = quantize(source, tmp_path / "model.gguf", "Q4_0")
    assert set(types_of_matrices(path).values()) == {"Q4_0"}


def test_what_is_quantized_already_is_refused(original, tmp_path):
    source = quantize(original("llama"), tmp_path / "q8_0.gguf", "Q8_0")
    with pytest.raises(ConfigError, match=r"as Q8_0, expected F32, F16 or BF16"):
        quantize(source, tmp_path / "model.gguf", "Q4_0")
    assert list(tmp_path.iterdir()) == [source]


def test_rows_too_short_for_the_type_are_refused(tmp_path):
    """llama.cpp would silently take another type, and measurements would be mislabeled."""
    source = write_random_model(tmp_path / "tiny.gguf", SHAPE_TINY, F32)
    with pytest.raises(ConfigError, match=r"as Q5_0: rows must be whole blocks of Q4_K"):
        quantize(source, tmp_path / "model.gguf", "Q4_K")
    assert list(tmp_path.iterdir()) == [source]


def test_unknown_weights_are_refused(original, tmp_path):
    with pytest.raises(ConfigError, match=r"'Q5_K', expected one of F16, Q8_0, Q4_0, Q4_K, Q6_K"):
        quantize(original("llama"), tmp_path / "model.gguf", "Q5_K")


def test_the_quantizers_reason_is_told(original, tmp_path):
    listener = log_listener()
    reason = r"returned 1, expected 0, for .*: .*failed to quantize: .* room in .*no-folder\?"
    with pytest.raises(LlmaasError, match=reason):
        quantize(original("llama"), tmp_path / "no-folder" / "model.gguf", "Q8_0")
    assert log_listener() == listener


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_wait_until_llama_cpp_calls_nobody(original, tmp_path, monkeypatch, number):
    """An exception from their handlers would be lost in a callback."""
    passed = []

    def quantizer(*_args):
        signal.raise_signal(number)
        passed.append(number)
        return 0

    monkeypatch.setattr(llama_cpp, "llama_model_quantize", quantizer)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            quantize(original("llama"), tmp_path / "model.gguf", "Q8_0")
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert passed == [number]


def log_listener():
    """Return the address of llama.cpp's log callback."""
    listener, data = llama_cpp.llama_log_callback(), ctypes.c_void_p()
    llama_cpp.llama_log_get(ctypes.byref(listener), ctypes.byref(data))
    return ctypes.cast(listener, ctypes.c_void_p).value
