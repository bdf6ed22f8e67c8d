"""Weights of the families that tests claim, and models in which parts of them are zero."""

from __future__ import annotations

import functools
import re
import shutil

import numpy as np
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES

from llmaas_patches.native.claims import tensor_places
from llmaas_patches.native.library import load_library

UP = r"blk\.\d+\.ffn_up\.weight"
DOWN = r"blk\.\d+\.ffn_down\.weight"
ROWS = {
    "llama": (r"blk\.\d+\.(ffn_up|ffn_gate|attn_q)\.weight", 100),
    "llama-moe": (r"blk\.\d+\.ffn_(up|gate)_exps\.weight", 100),
    "phi3": (r"blk\.\d+\.(ffn_up|attn_qkv)\.weight", 300),
}
COLUMNS = {
    "llama": (DOWN, 250),
    "llama-moe": (r"blk\.\d+\.ffn_down_exps\.weight", 128),
    "phi3": (DOWN, 250),
}
TYPES = ("F32", "F16", "Q8_0", "Q4_0", "Q4_K")
CUT = [
    (name, weights)
    for name in COLUMNS
    for weights in TYPES
    if (name, weights) != ("llama-moe", "Q4_K")  # its experts' rows are a single block
]
"""Families and types whose columns can be split."""


def rounded(n, step):
    return -(-n // step) * step


def columns_of(name, weights):
    """Return the pattern of a family's weights, and a column at a block boundary to split at."""
    pattern, n = COLUMNS[name]
    return pattern, rounded(n, 256 if weights == "Q4_K" else 32)


@functools.cache
def places(path):
    """Return the name, type, shape in bytes and offset of each tensor."""
    found = []
    for name, place in tensor_places(load_library(), [path]).items():
        kind = GGMLQuantizationType(place.info.type)
        block, size = GGML_QUANT_SIZES[kind]
        n_columns, *rows = place.info.shape
        found.append((name, kind, (*reversed(rows), n_columns // block * size), place.offset))
    return found


def zeroed(path, copy, pattern, *, rows=None, columns=None):
    """Copy a model and keep only the given rows or columns of some weights; the rest are zero."""
    shutil.copyfile(path, copy)
    found = [place for place in places(path) if re.fullmatch(pattern, place[0])]
    assert found
    for _, kind, shape, offset in found:
        data = np.memmap(copy, np.uint8, "r+", offset, shape)
        block, size = GGML_QUANT_SIZES[kind]
        if rows is not None:  # zero bytes are zero values in every type
            data[..., rows:, :] = 0
        else:
            assert columns % block == 0
            data[..., columns // block * size :] = 0
    return copy
