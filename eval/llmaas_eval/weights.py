"""Weights of a model in float32, and copies of a model with F16 weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFWriter, quants
from numpy.typing import NDArray

from llmaas_eval.models import copy_field, finish, open_writer

__all__ = ["f16_copy", "finish_f16", "kept_f16_copy", "read_weights", "write_f16"]

_FILE_TYPE = "general.file_type"
_F16 = 1

Weights = Mapping[str, NDArray[np.float32]]
"""Weights by the names of their tensors."""


def read_weights(reader: GGUFReader) -> dict[str, NDArray[np.float32]]:
    """Return all tensors in float32, whatever their type in the file."""
    return {
        tensor.name: quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        for tensor in reader.tensors
    }


def write_f16(source: GGUFReader, weights: Weights, path: Path) -> Path:
    """Write a model like ``source`` with ``weights``, matrices as F16."""
    writer = open_writer(path, "llama")
    for name, entry in source.fields.items():
        if not name.startswith("GGUF.") and name not in {"general.architecture", _FILE_TYPE}:
            copy_field(writer, entry)
    return finish_f16(writer, weights, path)


def finish_f16(writer: GGUFWriter, weights: Weights, path: Path) -> Path:
    """Add weights to a writer, matrices as F16, and write its file."""
    writer.add_file_type(_F16)
    for name, values in weights.items():
        kind: Any = np.float32 if values.ndim == 1 else np.float16
        writer.add_tensor(name, values.astype(kind))
    return finish(writer, path)


def f16_copy(source: Path, folder: Path) -> Path:
    """Write a copy of ``source`` with F16 weights to ``folder``; return its path.

    With Q8_0 weights llama.cpp also rounds activations, which turns the smallest change of a cell
    into a KL of 1e-4.
    """
    folder.mkdir(parents=True, exist_ok=True)
    reader = GGUFReader(source)
    return write_f16(reader, read_weights(reader), _f16_path(source, folder))


def kept_f16_copy(source: Path, folder: Path) -> Path:
    """Return the path of ``f16_copy``, which is made if ``folder`` does not have it."""
    path = _f16_path(source, folder)
    return path if path.exists() else f16_copy(source, folder)


def _f16_path(source: Path, folder: Path) -> Path:
    return folder / f"{source.stem}-as-f16.gguf"
