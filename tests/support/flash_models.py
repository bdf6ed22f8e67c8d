"""Small model files with random matrices, their properties, and calibrations for them."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quants
from gguf.constants import GGML_QUANT_SIZES

from llmaas_hooks import TensorInfo
from llmaas_plugins.flash_weights.calibration import Activity
from llmaas_plugins.flash_weights.channel_layout import channel_operands
from llmaas_plugins.flash_weights.shares import SPARSITIES

WIDTH, N_FF, N_KV = 64, 160, 32
"""Row lengths; some are multiples of the 128-value chunks and some are not."""


def write_model(path, kind, n_layers=3, *, names=None, seed=0):
    """Write a file that holds only ``n_layers`` layers of the llama architecture."""
    path.write_bytes(_model(kind, tuple((names or matrices(n_layers)).items()), seed))
    return path


@functools.cache
def _model(kind, names, seed):
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        writer = GGUFWriter(path, "llama")
        for name, dims in names:
            writer.add_tensor(name, _random(rng, dims, kind), raw_dtype=kind)
        writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


def _random(rng, dims, kind):
    if kind != GGMLQuantizationType.Q4_K:
        return quants.quantize(rng.standard_normal(dims, dtype=np.float32), kind)
    n_values, n_bytes = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(256, size=(dims[0], dims[1] // n_values, n_bytes), dtype=np.uint8)
    scales = rng.uniform(0.001, 0.01, (*blocks.shape[:2], 2)).astype(np.float16)
    blocks[..., :4] = scales.view(np.uint8)
    return blocks.reshape(dims[0], -1)


def matrices(n_layers):
    """Return the shapes of the matrices, rows first."""
    layer = {
        "attn_q": (WIDTH, WIDTH),
        "attn_k": (N_KV, WIDTH),
        "attn_v": (N_KV, WIDTH),
        "attn_output": (WIDTH, WIDTH),
        "ffn_gate": (N_FF, WIDTH),
        "ffn_up": (N_FF, WIDTH),
        "ffn_down": (WIDTH, N_FF),
    }
    blocks = {
        f"blk.{i}.{name}.weight": dims for i in range(n_layers) for name, dims in layer.items()
    }
    return {"token_embd.weight": (256, WIDTH), **blocks}


def tensors_of(path):
    """Return a model's tensors as the plugin receives them."""
    found = {}
    for tensor in GGUFReader(path).tensors:
        shape = (*(int(n) for n in tensor.shape), 1, 1)[:3]
        found[tensor.name] = TensorInfo(int(tensor.tensor_type), shape, int(tensor.n_bytes), 0)
    return found


def weights_of(path):
    """Return the values of each matrix, rows first."""
    return {
        tensor.name: quants.dequantize(tensor.data, GGMLQuantizationType(tensor.tensor_type))
        for tensor in GGUFReader(path).tensors
    }


def calibration_of(tensors, seed=0):
    """Return a random calibration."""
    rng = np.random.default_rng(seed)
    return {
        operand: Activity(
            np.sort(rng.random(len(SPARSITIES), np.float32)),
            rng.random(operand.n_channels, np.float32),
            np.sort(rng.random(len(SPARSITIES), np.float32)) * np.float32(0.95),
        )
        for operand in channel_operands(tensors)
    }
