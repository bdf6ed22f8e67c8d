"""Convert models to other weight types with llama.cpp's own quantizer."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import llama_cpp

from llmaas_hooks import ConfigError, LlmaasError
from llmaas_plugins.model.gguf_header import read_header
from llmaas_plugins.signals import signals_wait

__all__ = ["WEIGHTS", "check_original", "quantize", "run_quantizer"]

WEIGHTS: Mapping[str, int] = {
    "F16": llama_cpp.LLAMA_FTYPE_MOSTLY_F16,
    "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "Q4_K": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_S,
    "Q6_K": llama_cpp.LLAMA_FTYPE_MOSTLY_Q6_K,
}
"""llama.cpp's file types, by the type that all their matrices have."""

_ERROR = 4
"""ggml's log level for errors."""


def quantize(source: Path, path: Path, weights: str) -> Path:
    """Write ``source`` with every matrix that llama.cpp quantizes in one type.

    Args:
        source: A GGUF of F32, F16 or BF16.
        path: Path of the result, which is replaced atomically.
        weights: Type of the matrices, a key of ``WEIGHTS``.

    Returns:
        ``path``.

    Raises:
        ConfigError: ``weights`` is unknown, ``source`` is already quantized, or its rows are not
            whole blocks: 256 values for ``Q4_K`` and ``Q6_K``, 32 for other types.
        LlmaasError: llama.cpp could not read ``source`` or write the result.
    """
    if weights not in WEIGHTS:
        raise ConfigError(f"Unknown weights {weights!r}, expected one of {', '.join(WEIGHTS)}.")
    check_original(source)
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = WEIGHTS[weights]
    params.pure = True  # otherwise llama.cpp gives some matrices more bits
    partial = path.with_suffix(".partial")
    try:
        run_quantizer(source, partial, params)
        others = _other_than(partial, weights)
        if others:
            raise ConfigError(
                f"{source} as {weights} has {others}: rows must be whole blocks of {weights}."
            )
        return partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def run_quantizer(source: Path, path: Path, params: Any) -> None:
    """Write ``source`` with other weights to ``path``.

    Args:
        source: A GGUF of F32, F16 or BF16.
        path: Output file.
        params: llama.cpp's parameters of quantization.

    Raises:
        LlmaasError: llama.cpp could not read ``source`` or write the result.
    """
    with signals_wait(), _errors() as said:
        code = llama_cpp.llama_model_quantize(bytes(source), bytes(path), ctypes.byref(params))
    if code:
        raise LlmaasError(
            f"llama_model_quantize returned {code}, expected 0, for {source} to {path}: "
            f"{' '.join(said) or 'no reason given'}. Is there room in {path.parent}?"
        )


def check_original(source: Path) -> None:
    """Check that a model can be quantized.

    Raises:
        ConfigError: The model is already quantized.
    """
    others = _other_than(source, "F16", "BF16")
    if others:
        raise ConfigError(
            f"{source} has {others}, expected F32, F16 or BF16: quantize the original model."
        )


@contextlib.contextmanager
def _errors() -> Iterator[list[str]]:
    """Collect the errors that llama.cpp logs.

    Other messages are dropped: llama.cpp logs one for every tensor.
    """
    said: list[str] = []

    def keep(level: int, text: bytes, _: object) -> None:
        if level == _ERROR:
            said.append(text.decode(errors="replace").strip())

    listener, before = llama_cpp.llama_log_callback(keep), llama_cpp.llama_log_callback()
    data = ctypes.c_void_p()
    llama_cpp.llama_log_get(ctypes.byref(before), ctypes.byref(data))
    llama_cpp.llama_log_set(listener, None)
    try:
        yield said
    finally:
        llama_cpp.llama_log_set(before, data)


def _other_than(path: Path, *weights: str) -> str:
    """Return the first tensor that is neither of these types nor F32; empty if there is none."""
    found = ((name, place.type.name) for name, place in read_header(path).tensors.items())
    return next((f"{name} as {kind}" for name, kind in found if kind not in (*weights, "F32")), "")
