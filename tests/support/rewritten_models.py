"""Models derived from others: split into several files, or with two sets of RoPE factors."""

from __future__ import annotations

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from llmaas_eval.models import copy_field

ORIGINAL_CONTEXT = 256


def write_split(path, n, *, name=None):
    """Write a model again in ``n`` files, named as llama.cpp names them; return their paths."""
    source = GGUFReader(path)
    paths = [path.parent / f"{name or path.stem}-{i + 1:05}-of-{n:05}.gguf" for i in range(n)]
    for i, part in enumerate(paths):
        writer = GGUFWriter(part, _architecture(source))
        if i == 0:
            _copy_fields(source, writer)
        writer.add_key_value("split.no", i, GGUFValueType.UINT16)
        writer.add_key_value("split.count", n, GGUFValueType.UINT16)
        writer.add_key_value("split.tensors.count", len(source.tensors), GGUFValueType.INT32)
        _finish(writer, source.tensors[i::n])
    return paths


def write_longrope(source_path, path):
    """Write a model with other RoPE factors beyond ``ORIGINAL_CONTEXT`` tokens; return ``path``."""
    source = GGUFReader(source_path)
    architecture = _architecture(source)
    n_embd, n_head = (
        int(source.fields[f"{architecture}.{key}"].contents())
        for key in ("embedding_length", "attention.head_count")
    )
    n_factors = n_embd // n_head // 2
    writer = GGUFWriter(path, architecture)
    _copy_fields(source, writer)
    key = f"{architecture}.rope.scaling.original_context_length"
    writer.add_key_value(key, ORIGINAL_CONTEXT, GGUFValueType.UINT32)
    writer.add_tensor("rope_factors_short.weight", np.ones(n_factors, np.float32))
    writer.add_tensor("rope_factors_long.weight", np.linspace(1, 40, n_factors, dtype=np.float32))
    _finish(writer, source.tensors)
    return path


def _architecture(source):
    return source.fields["general.architecture"].contents()


def _copy_fields(source, writer):
    for name, entry in source.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")):
            copy_field(writer, entry)


def _finish(writer, tensors):
    for tensor in tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
