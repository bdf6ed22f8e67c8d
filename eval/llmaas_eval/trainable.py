"""A model in torch whose weights are all parameters, for studies that train copies of a model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from llmaas_eval.weights import read_weights
from llmaas_plugins.elastic.torch_model import Decoder, Weights

__all__ = ["Trainable"]


class Trainable(nn.Module):
    """A model whose weights are parameters.

    Attributes:
        device: Device of the weights, which computes.
    """

    def __init__(self, path: Path, device: torch.device = Decoder.device) -> None:
        """Load the weights of a GGUF file of the llama architecture."""
        super().__init__()
        self._decoder = Decoder(path)
        self.device = self._decoder.device = device
        self._weights = nn.ParameterDict()
        for name, values in read_weights(GGUFReader(path)).items():
            weight = torch.from_numpy(values).to(device)
            self._weights[name.replace(".", "/")] = nn.Parameter(weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape ``(n, n_tokens, n_vocab)``."""
        embedding = self._weights["token_embd/weight"]
        x = functional.embedding(tokens, embedding)
        for layer in range(self._decoder.blocks.n_layers):
            x = self._decoder.block(layer, self._layer(layer), x)
        return self._decoder.norm(x, self._weights["output_norm/weight"]) @ embedding.t()

    def _layer(self, layer: int) -> Weights:
        prefix = f"blk/{layer}/"
        return {
            name.removeprefix(prefix).replace("/", "."): weight
            for name, weight in self._weights.items()
            if name.startswith(prefix)
        }

    def arrays(self) -> dict[str, NDArray[np.float32]]:
        """Return the weights by their GGUF names."""
        return {
            name.replace("/", "."): weight.detach().cpu().numpy()
            for name, weight in self._weights.items()
        }
