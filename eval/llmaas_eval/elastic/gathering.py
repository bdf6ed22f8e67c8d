"""Copy a width's units from their places in a model without reordering (Fig 16b)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from numpy.typing import NDArray

from llmaas_plugins.elastic.units import Widths, blocks_of

__all__ = ["Gather"]

_Move = tuple[NDArray[Any], NDArray[np.intp], int, NDArray[Any]]


class Gather:
    """Copy of a width's units from random places of a model to contiguous memory."""

    def __init__(self, model: Path, widths: Widths) -> None:
        """Read the model's weights, and allocate the copy."""
        blocks = blocks_of(model)
        shares = {
            "attn_q": (0, blocks.n_groups, widths.groups[0]),
            "attn_output": (1, blocks.n_groups, widths.groups[0]),
            "ffn_gate": (0, blocks.n_ff, widths.neurons[0]),
            "ffn_up": (0, blocks.n_ff, widths.neurons[0]),
            "ffn_down": (1, blocks.n_ff // blocks.granule, widths.neurons[0] // blocks.granule),
        }
        self._moves = [
            _move(np.array(tensor.data), *shares[matrix])
            for tensor in GGUFReader(model).tensors
            if (matrix := tensor.name.split(".")[-2]) in shares
        ]

    def __call__(self) -> None:
        """Copy the units."""
        for units, picks, axis, kept in self._moves:
            np.take(units, picks, axis=axis, out=kept, mode="clip")


def _move(data: NDArray[Any], axis: int, n_units: int, n_kept: int) -> _Move:
    units = data.reshape(*data.shape[:axis], n_units, -1)
    picks = np.sort(np.random.default_rng(0).permutation(n_units)[:n_kept])
    return units, picks, axis, np.take(units, picks, axis=axis)
