"""Models in low-bit types, as llama.cpp's quantizer makes them with an importance matrix.

The quantizer gives some matrices more bits than its type's name says. A file's real bits a weight
are counted from its tensors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp
import numpy as np
from llama_cpp import llama_cpp as api
from numpy.typing import NDArray

from llmaas_patches.native.packing import model_tensors
from llmaas_plugins.model.quantize import run_quantizer

__all__ = ["TYPES", "Importance", "bits_of", "bytes_of", "flat_importance", "importance", "typed"]

Importance = Mapping[str, NDArray[np.float32]]
"""Mean square of the inputs of each column, by weight name."""


class _Type(NamedTuple):
    """A file type of llama.cpp, and whether its quantizer gets an importance matrix."""

    number: int
    is_weighted: bool


TYPES: Mapping[str, _Type] = {
    "Q8_0": _Type(llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, False),
    "Q4_0": _Type(llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, False),
    "Q4_K": _Type(llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_S, True),
    "Q3_K": _Type(llama_cpp.LLAMA_FTYPE_MOSTLY_Q3_K_S, True),
    "Q2_K": _Type(llama_cpp.LLAMA_FTYPE_MOSTLY_Q2_K, True),
    "IQ2_XS": _Type(llama_cpp.LLAMA_FTYPE_MOSTLY_IQ2_XS, True),
}
"""Types by name. ``Q4_0`` gets no importance matrix: it would turn matrices into Q4_1, and it is
the type of our own rows."""


def typed(source: Path, path: Path, name: str, weights: Importance, n_threads: int) -> Path:
    """Write a model in a type of ``TYPES``, unless the file exists.

    Args:
        source: GGUF file in F16.
        path: Output file; replaced atomically.
        name: Key in ``TYPES``.
        weights: Importance of the columns.
        n_threads: Threads of the quantizer.

    Returns:
        ``path``.
    """
    if path.exists():
        return path
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = TYPES[name].number, n_threads
    held = [_entry(weight, values) for weight, values in weights.items()]
    entries = (api.llama_model_imatrix_data * (len(held) + 1))(*held)  # the last has no name
    if TYPES[name].is_weighted:
        params.imatrix = entries
    partial = path.with_suffix(".partial")
    try:
        run_quantizer(source, partial, params)
        return partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def importance(model: Path, windows: Sequence[NDArray[np.int64]]) -> Importance:
    """Measure the importance of columns on some text, as ``llama-imatrix`` does; needs torch.

    Args:
        model: GGUF file.
        windows: Tokens of the text.
    """
    from llmaas_eval.sparse.oracle import Oracle
    from llmaas_plugins.flash_weights.operands import FAMILIES

    oracle, sums = Oracle(model), dict[str, NDArray[np.float32]]()
    for window in windows:
        for (layer, family), x in oracle.read(window).items():
            for matrix in FAMILIES[family]:
                weight = f"blk.{layer}.{matrix}.weight"
                sums[weight] = sums.get(weight, np.float32(0)) + np.square(x).mean(0)
    return {name: values / np.float32(len(windows)) for name, values in sums.items()}


def flat_importance(model: Path) -> Importance:
    """Return equal importance of all columns of a model's blocks."""
    return {
        name: np.ones(info.shape[0], np.float32)
        for name, info in model_tensors(model).items()
        if name.startswith("blk.")
    }


def bytes_of(model: Path) -> int:
    """Return the bytes of a model's tensors."""
    return sum(info.n_bytes for info in model_tensors(model).values())


def bits_of(model: Path) -> float:
    """Return the mean bits of a weight."""
    n = sum(int(np.prod(info.shape)) for info in model_tensors(model).values())
    return 8 * bytes_of(model) / n


def _entry(name: str, values: NDArray[np.float32]) -> Any:
    data = (ctypes.c_float * len(values))(*values.tolist())
    return api.llama_model_imatrix_data(
        name.encode(), ctypes.cast(data, ctypes.POINTER(ctypes.c_float)), len(values)
    )
