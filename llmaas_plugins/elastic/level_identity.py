"""Identity of what a model's levels compute, by which others keep what they learned about them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from llmaas_plugins.elastic.adapter_index import AdapterTable
from llmaas_plugins.elastic.units import Widths

__all__ = ["levels_id", "levels_key"]


def levels_key(
    levels: Sequence[float],
    widths: Sequence[Widths],
    biases: Mapping[str, NDArray[np.float32]],
    adapters: AdapterTable | None,
) -> str:
    """Return a hash of all by which levels differ from the whole model.

    Args:
        levels: Levels, widest first.
        widths: Widths by level.
        biases: Biases that are added to products, by weight.
        adapters: Place and checksum of the adapters; None if none are added.
    """
    key = hashlib.sha256(np.array(levels).tobytes())
    for one in widths:
        key.update(one.groups.tobytes() + one.neurons.tobytes())
    for name, bias in sorted(biases.items()):
        key.update(name.encode() + bias.tobytes())
    if adapters is not None:
        key.update(adapters.model_dump_json().encode())
    return key.hexdigest()


def levels_id(digest: str, key: str) -> str:
    """Return the name of what levels compute: of the file's digest and of ``levels_key``."""
    return hashlib.sha256(f"{digest} {key}".encode()).hexdigest()[:32]
