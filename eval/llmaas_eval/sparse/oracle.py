"""Sparse decoding in torch: a forward pass with masked inputs of every block's matrices.

Every position is computed as if it were decoded alone: its own small inputs are left out, and it
attends to the cells of earlier positions. Selection ``threshold`` leaves out values below a
quantile of the operand (TEAL). Selection ``top-k`` keeps only each token's largest values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from llmaas_eval.sparse.texts import Tokens
from llmaas_plugins.elastic.torch_model import Decoder, Weights
from llmaas_plugins.flash_weights.operands import FAMILIES

__all__ = ["SELECTIONS", "Activations", "Key", "Oracle", "Selection", "perplexities"]

Key = tuple[int, str]
"""Layer and family of an operand."""

Selection = Literal["threshold", "top-k"]
SELECTIONS: tuple[Selection, ...] = ("threshold", "top-k")

_FAMILY = {matrix: family for family, matrices in FAMILIES.items() for matrix in matrices}

_SHARES = np.linspace(0, 1, 201)

Activations = Mapping[Key, NDArray[np.float32]]
"""Activations by operand, shape ``(n_tokens, n_channels)``."""


class _Mask(NamedTuple):
    """Which channels are left out.

    Attributes:
        sparsity: Share of the channels that are left out.
        selection: How these channels are selected.
        n_dense: Number of first tokens that are computed with all channels, as in a prompt.
    """

    sparsity: float
    selection: Selection
    n_dense: int


class Oracle(Decoder):
    """A model that can leave channels out and can record operands; all weights are in memory.

    Attributes:
        n_layer: Number of layers.
    """

    def __init__(self, path: Path) -> None:
        """Load the weights of a GGUF file."""
        super().__init__(path)
        self.n_layer = self.blocks.n_layers
        self._layers = [Decoder.weights(self, i) for i in range(self.n_layer)]
        self._mask = _Mask(0, "top-k", 0)
        self._sizes: dict[Key, NDArray[np.float32]] = {}
        self._quantiles: dict[Key, NDArray[np.float32]] = {}
        self._operands: dict[Key, Tensor] | None = None

    def calibrate(self, windows: Tokens) -> None:
        """Compute thresholds from the operands of a dense pass over ``windows``."""
        found: dict[Key, list[NDArray[np.float32]]] = {}
        for window in tqdm(windows, desc="calibration", unit="window", disable=None):
            for key, x in self.read(window).items():
                found.setdefault(key, []).append(np.abs(x))
        self._sizes = {key: np.concatenate(parts) for key, parts in found.items()}
        self._quantiles = {key: np.quantile(x, _SHARES) for key, x in self._sizes.items()}

    def threshold(self, key: Key, sparsity: float) -> float:
        """Return the quantile ``sparsity`` of an operand's magnitudes on the calibration text."""
        return float(np.interp(sparsity, _SHARES, self._quantiles[key]))

    def busy(self, key: Key, sparsity: float) -> NDArray[np.float64]:
        """Return how often each channel of an operand was active on the calibration text."""
        return (self._sizes[key] >= self.threshold(key, sparsity)).mean(axis=0)

    def mask(self, sparsity: float, selection: Selection, n_dense: int = 0) -> None:
        """Leave out channels from now on."""
        self._mask = _Mask(sparsity, selection, n_dense)

    def read(self, tokens: NDArray[np.int64]) -> Activations:
        """Return the operands of one row of tokens, before masking."""
        self._operands = {}
        self.run(tokens[None].astype(np.int32))
        found, self._operands = self._operands, None
        return {key: x.numpy() for key, x in found.items()}

    def nats(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the surprise in nats at each token of a row after the first."""
        output = self.run(tokens[None, :-1].astype(np.int32))[0]
        found: NDArray[np.float32] = self.losses(output, torch.from_numpy(tokens[1:])).numpy()
        return found

    def weights(self, layer: int) -> Weights:
        """Return the weights of a layer."""
        return self._layers[layer]

    def product(self, layer: int, weights: Weights, name: str, x: Tensor) -> Tensor:
        """Return the product of a matrix with the channels of ``x`` that are not left out."""
        key = layer, _FAMILY[name]
        if self._operands is not None:
            self._operands[key] = x
        x = self._masked(x, key) if self._mask.sparsity else x
        return super().product(layer, weights, name, x)

    def _masked(self, x: Tensor, key: Key) -> Tensor:
        sparsity, selection, n_dense = self._mask
        sizes = x.abs()
        if selection == "threshold":
            least = torch.tensor(self.threshold(key, sparsity))
        else:
            n_left_out = round(sparsity * x.shape[-1])
            least = sizes.kthvalue(n_left_out + 1, dim=-1, keepdim=True).values
        kept = sizes >= least
        kept[:n_dense] = True
        return x * kept


def perplexities(
    oracle: Oracle,
    windows: Tokens,
    sparsities: Iterable[float],
    selection: Selection,
    n_dense: int = 0,
) -> dict[float, float]:
    """Return perplexity by sparsity, over tokens after each window's first ``n_dense``."""
    found = {}
    for sparsity in tqdm(list(sparsities), desc=f"perplexity, {selection}", disable=None):
        oracle.mask(sparsity, selection, n_dense)
        nats = np.concatenate([oracle.nats(window)[n_dense:] for window in windows])
        found[sparsity] = float(np.exp(nats.mean()))
    oracle.mask(0, "top-k")
    return found
