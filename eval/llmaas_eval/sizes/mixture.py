"""Types of a file's matrices, as llama.cpp's quantizer chooses them.

The quantizer decides by the metadata, the names and the row lengths of tensors. So it gets a file
that has all this, but only two rows of each matrix.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import llama_cpp
from gguf import GGMLQuantizationType

from llmaas_eval.sizes.layout import PlannedTensor, header_bytes, padding
from llmaas_eval.sizes.shapes import SizedShape
from llmaas_plugins.files.partial_file import write_bytes
from llmaas_plugins.model.gguf_entries import entry
from llmaas_plugins.model.gguf_header import read_header
from llmaas_plugins.model.quantize import run_quantizer

__all__ = ["FILE_TYPES", "tensor_types"]

FILE_TYPES: Mapping[str, int] = {
    "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "Q4_K_M": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    "Q5_K_M": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_K_M,
    "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
}
"""llama.cpp's file types, by the names that its users know."""

_N_ROWS = 2
_F16, _F32 = GGMLQuantizationType.F16, GGMLQuantizationType.F32


def tensor_types(
    shape: SizedShape, n_vocab: int, file_type: str
) -> dict[str, GGMLQuantizationType]:
    """Return the type of each tensor of a model of ``shape``, by name.

    Args:
        shape: Dimensions of the model.
        n_vocab: Number of tokens.
        file_type: Key in ``FILE_TYPES``.

    Raises:
        LlmaasError: llama.cpp could not quantize such a model.
    """
    shapes = shape.tensors(n_vocab)
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = FILE_TYPES[file_type], 1
    with tempfile.TemporaryDirectory(prefix="llmaas-sizes-") as folder:
        source, path = Path(folder) / "rows.gguf", Path(folder) / "quantized.gguf"
        _write_rows(source, shape, n_vocab, shapes)
        run_quantizer(source, path, params)
        found = {name: tensor.type for name, tensor in read_header(path).tensors.items()}
    return {name: found.get(name, _F32) for name in shapes}


def _write_rows(
    path: Path, shape: SizedShape, n_vocab: int, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Write a model in F16 with two rows of zeros in each matrix."""
    numbers = shape.metadata(n_vocab).items()
    entries = [
        entry("general.architecture", shape.arch),
        *(entry(key, value) for key, value in numbers),
    ]
    tensors = [
        PlannedTensor(
            name,
            _F32 if name.endswith("ffn_gate_inp.weight") else _F16,
            (dims[0], _N_ROWS, *dims[2:]),
        )
        for name, dims in shapes.items()
        if len(dims) > 1
    ]
    zeros = b"".join(bytes(tensor.n_bytes) + padding(tensor.n_bytes) for tensor in tensors)
    write_bytes(path, header_bytes(entries, tensors) + zeros)
