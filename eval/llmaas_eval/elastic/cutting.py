"""A level written as its own model file, as systems without elastic weights would load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, quants
from numpy.typing import NDArray

from llmaas_eval.models import copy_field, finish, open_writer
from llmaas_plugins.elastic.metadata import PREFIX
from llmaas_plugins.elastic.uniform import step_of
from llmaas_plugins.elastic.units import Blocks, Widths, blocks_of

__all__ = ["even_widths", "write_cut"]


def even_widths(blocks: Blocks, level: float) -> Widths:
    """Return equal widths of all layers that use at most share ``level`` of the blocks' bytes."""
    n_groups = max(blocks.group_granule, round(level * blocks.n_groups))
    group, neuron = sum(blocks.group_bytes), sum(blocks.neuron_bytes)
    n_bytes = level * (blocks.n_groups * group + blocks.n_ff * neuron) - n_groups * group
    step = step_of(blocks)
    n_neurons = min(blocks.n_ff, max(step, int(n_bytes / neuron + 1e-9) // step * step))
    layers = np.ones(blocks.n_layers, np.int32)
    return Widths(n_groups * layers, n_neurons * layers)


def write_cut(source: Path, widths: Widths, path: Path) -> Path:
    """Write the leading units of a model, with only the K and V projections of these units.

    Args:
        source: GGUF of the llama architecture without biases.
        widths: Widths, which must be equal in all layers because llama.cpp requires it.
        path: Output file.

    Returns:
        ``path``.

    Raises:
        ValueError: The layers have different widths.
    """
    if len({*widths.groups.tolist()}) > 1 or len({*widths.neurons.tolist()}) > 1:
        raise ValueError("the layers have different widths; a model file allows only one")
    blocks, reader = blocks_of(source), GGUFReader(source)
    n_groups, n_ff = int(widths.groups[0]), int(widths.neurons[0])
    numbers = {
        "attention.head_count": n_groups * blocks.heads_per_group,
        "attention.head_count_kv": n_groups,
        "attention.key_length": blocks.head_dim,
        "attention.value_length": blocks.head_dim,
        "feed_forward_length": n_ff,
    }
    writer = open_writer(path, blocks.arch)
    replaced = {"general.architecture", *(f"{blocks.arch}.{key}" for key in numbers)}
    for name, entry in reader.fields.items():
        if not name.startswith(("GGUF.", PREFIX)) and name not in replaced:
            copy_field(writer, entry)
    for key, number in numbers.items():
        writer.add_uint32(f"{blocks.arch}.{key}", number)
    rows, columns = _extents(blocks, n_groups, n_ff)
    for tensor in reader.tensors:
        matrix, data = tensor.name.split(".")[-2], tensor.data
        if matrix in rows:
            data = data[: rows[matrix]]
        if matrix in columns:
            data = _columns(data, columns[matrix], tensor.tensor_type)
        writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    return finish(writer, path)


def _extents(blocks: Blocks, n_groups: int, n_ff: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the remaining rows, and the remaining columns, by matrix."""
    n_queries, n_keys = n_groups * blocks.group_width, n_groups * blocks.head_dim
    heads = {"attn_q": n_queries, "attn_k": n_keys, "attn_v": n_keys}
    return heads | {"ffn_gate": n_ff, "ffn_up": n_ff}, {"attn_output": n_queries, "ffn_down": n_ff}


def _columns(data: NDArray[Any], n: int, kind: GGMLQuantizationType) -> NDArray[Any]:
    is_quantized = data.dtype.kind == "u"
    width = quants.quant_shape_to_byte_shape((len(data), n), kind)[1] if is_quantized else n
    return data[:, :width].copy()
