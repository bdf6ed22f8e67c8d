"""Layer collapse (LaCo, Yang et al. 2024): layers are merged into the one before them.

From the last layers to the first, some consecutive ones become one, whose weights are the first's
and what each of the others differs from it by. That stays if what the last layer puts out is
similar enough. The paper sets how similar; here that falls until as few layers are left as wanted.
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
"""Layers that become one: the fewest with which that is more than leaving one out."""
_SIMILARITIES = (*np.linspace(0.95, -0.95, 39), -1.0)
_MOST_WINDOWS = 4
"""That outputs are compared on: the paper takes a few sentences."""

Layers = Sequence[Weights]

Merges = tuple[tuple[int, int], ...]
"""First layer, as they are numbered by then, and how many after it are merged into it."""


def write_merged(source: Path, path: Path, n_layers: int, calibration: Windows) -> Path:
    """Write a model with so many layers.

    Args:
        source: The model; F16.
        path: Where; replaced atomically.
        n_layers: At least one.
        calibration: Text that outputs are compared on.

    Returns:
        ``path``.

    Raises:
        ValueError: The model has no more layers.
    """
    decoder, windows = Decoder(source), calibration[:_MOST_WINDOWS].astype(np.int32)
    layers = [decoder.weights(layer) for layer in range(decoder.blocks.n_layers)]
    if not 0 < n_layers < len(layers):
        raise ValueError(f"{n_layers} layers are wanted of {len(layers)}")
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
    """What leaves so many layers, and is nowhere less similar than ``least``; or nothing."""
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
    """What layers have in common is kept once, and what they differ by is added (RDSC)."""
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
