"""Layer collapse (LaCo, Yang et al. 2024): layers are merged into the layer before them.

From the last layers to the first, a few consecutive layers become one. Its weights are the first
layer's plus each other layer's difference from the first. A merge is kept if the last layer's
output stays similar enough. The paper fixes that similarity threshold; here it falls until few
enough layers are left.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader

from llmaas_eval.elastic.texts import Windows
from llmaas_eval.models import copy_field, finish, open_writer
from llmaas_plugins.elastic.torch_model import Decoder, Weights

__all__ = ["write_merged"]

_MERGED = 3
"""Layers merged into one. Merging only two would equal leaving out the first of them."""
_SIMILARITIES = (*np.linspace(0.95, -0.95, 39), -1.0)
_MOST_WINDOWS = 4
"""Most calibration windows to compare outputs on; the paper uses a few sentences."""

Layers = Sequence[Weights]

Merges = tuple[tuple[int, int], ...]
"""Merges in order: the first layer's number at that point, and how many layers join it."""


def write_merged(source: Path, path: Path, n_layers: int, calibration: Windows) -> Path:
    """Write a model merged down to ``n_layers`` layers.

    Args:
        source: F16 GGUF of the model.
        path: Output file; replaced atomically.
        n_layers: Layers to keep: at least 1, fewer than the model has.
        calibration: Text on which outputs are compared.

    Returns:
        ``path``.

    Raises:
        ValueError: ``n_layers`` is out of range.
    """
    decoder, windows = Decoder(source), calibration[:_MOST_WINDOWS].astype(np.int32)
    layers = [decoder.weights(layer) for layer in range(decoder.blocks.n_layers)]
    if not 0 < n_layers < len(layers):
        raise ValueError(f"{n_layers} layers wanted, expected at least 1 and under {len(layers)}")
    expected = _output(decoder, layers, windows)

    @functools.cache
    def similarity(merges: Merges) -> float:
        found = _output(decoder, _collapsed(layers, merges), windows)
        return float(torch.cosine_similarity(found, expected, dim=-1).mean())

    found = (_merges(len(layers), n_layers, least, similarity) for least in _SIMILARITIES)
    return _write(source, path, _collapsed(layers, next(merges for merges in found if merges)))


def _merges(
    n_layers: int, n_wanted: int, least: float, similarity: Callable[[Merges], float]
) -> Merges:
    """Return merges that leave ``n_wanted`` layers with a similarity of at least ``least``.

    The result is empty if there are no such merges.
    """
    merges: Merges = ()
    first = max(0, n_layers - _MERGED)
    while first >= 0 and n_layers > n_wanted:
        n_others = min(_MERGED, n_layers - n_wanted + 1, n_layers - first) - 1
        more = (*merges, (first, n_others))
        if similarity(more) >= least:
            merges, n_layers = more, n_layers - n_others
        first = min(first - 1, max(0, n_layers - _MERGED))
    return merges if n_layers == n_wanted else ()


def _collapsed(layers: Layers, merges: Merges) -> Layers:
    """Apply merges by adding the layers' differences to the first layer (the paper's RDSC)."""
    for first, n_others in merges:
        base, end = layers[first], first + 1 + n_others
        one = {
            name: weight + sum(other[name] - weight for other in layers[first + 1 : end])
            for name, weight in base.items()
        }
        layers = [*layers[:first], one, *layers[end:]]
    return layers


def _output(decoder: Decoder, layers: Layers, windows: Windows) -> torch.Tensor:
    x = decoder.embed(windows)
    with torch.no_grad():
        for i, weights in enumerate(layers):
            x = torch.stack([decoder.block(i, weights, window) for window in x])
    return x


def _write(source: Path, path: Path, layers: Layers) -> Path:
    reader = GGUFReader(source)
    arch = str(reader.fields["general.architecture"].contents())
    own = f"{arch}.block_count"
    writer = open_writer(path, arch)
    for name, entry in reader.fields.items():
        if not name.startswith("GGUF.") and name not in {"general.architecture", own}:
            copy_field(writer, entry)
    writer.add_block_count(len(layers))
    for tensor in reader.tensors:
        if not tensor.name.startswith("blk."):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for i, weights in enumerate(layers):
        for name, weight in weights.items():
            kind = np.float32 if weight.ndim == 1 else np.float16
            writer.add_tensor(f"blk.{i}.{name}", weight.numpy().astype(kind))
    return finish(writer, path)
