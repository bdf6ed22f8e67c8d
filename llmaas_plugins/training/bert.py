"""BERT in torch: frozen bottom layers, trained top layers and a linear layer on each piece."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from llmaas_plugins.short_prompts.encoder.body import HEAD_WIDTH, Body, layer_of
from llmaas_plugins.short_prompts.encoder.model_file import Head

__all__ = ["PADDING", "Bert"]

PADDING = -1
"""Id in windows behind their pieces."""
_EPSILON = 1e-12


class Bert(nn.Module):
    """Encoder whose last layers are trained, with a linear layer on the outputs of each piece."""

    def __init__(self, body: Body, n_trained: int, n_outputs: int, seed: int = 0) -> None:
        """Copy the weights of a body.

        Args:
            body: Pretrained encoder.
            n_trained: Number of last layers that are trained; 0 trains only the linear layer.
            n_outputs: Number of classes.
            seed: Seed of the linear layer's first weights.
        """
        super().__init__()
        self._n_layers, self._n_heads = body.n_layers, body.n_embd // HEAD_WIDTH
        self._first_trained = body.n_layers - n_trained
        self._frozen = {
            name.replace(".", ":"): torch.tensor(values)
            for name, values in body.weights.items()
            if layer_of(name) < self._first_trained
        }
        self.trained = nn.ParameterDict(
            {
                name.replace(".", ":"): nn.Parameter(torch.tensor(values))
                for name, values in body.weights.items()
                if layer_of(name) >= self._first_trained
            }
        )
        first = np.random.default_rng(seed).standard_normal((n_outputs, body.n_embd)) * 0.02
        self.weight = nn.Parameter(torch.tensor(first, dtype=torch.float32))
        self.bias = nn.Parameter(torch.zeros(n_outputs))

    def forward(self, windows: Tensor) -> Tensor:
        """Return the classes' logits for each piece, ``(n_windows, n_pieces, n_outputs)``.

        Args:
            windows: Ids of pieces, ``(n_windows, n_pieces)``; ``PADDING`` behind each window's end.
        """
        return functional.linear(self.outputs(windows), self.weight, self.bias)

    def outputs(self, windows: Tensor) -> Tensor:
        """Return the outputs of the last layer, ``(n_windows, n_pieces, n_embd)``."""
        visible = (windows != PADDING)[:, None, None, :]
        with torch.no_grad():
            x = self._embed(windows.clamp(min=0))
            for layer in range(self._first_trained):
                x = self._layer(layer, x, visible)
        for layer in range(self._first_trained, self._n_layers):
            x = self._layer(layer, x, visible)
        return x

    def trained_weights(self) -> dict[str, NDArray[np.float32]]:
        """Return the trained layers' weights by their names in GGUF files."""
        return {
            name.replace(":", "."): each.detach().numpy().copy()
            for name, each in self.trained.items()
        }

    def head(self) -> Head:
        """Return the linear layer."""
        return Head(self.weight.detach().numpy().copy(), self.bias.detach().numpy().copy())

    def _embed(self, ids: Tensor) -> Tensor:
        weights = self._weights("")
        x = functional.embedding(ids, weights["token_embd.weight"])
        x = x + weights["token_types.weight"][0] + weights["position_embd.weight"][: ids.shape[1]]
        return _norm(x, weights, "token_embd_norm")

    def _weights(self, prefix: str) -> dict[str, Tensor]:
        """Return the weights whose names begin with ``prefix``, by the rest of their names."""
        start = prefix.replace(".", ":")
        found = {**self._frozen, **self.trained}
        return {
            name.removeprefix(start).replace(":", "."): weight
            for name, weight in found.items()
            if name.startswith(start)
        }

    def _layer(self, layer: int, x: Tensor, visible: Tensor) -> Tensor:
        weights = self._weights(f"blk.{layer}.")
        q, k, v = (
            _linear(x, weights, f"attn_{name}").unflatten(-1, (self._n_heads, -1)).transpose(1, 2)
            for name in "qkv"
        )
        y = functional.scaled_dot_product_attention(q, k, v, visible)
        y = _linear(y.transpose(1, 2).flatten(-2), weights, "attn_output")
        x = _norm(x + y, weights, "attn_output_norm")
        y = functional.gelu(_linear(x, weights, "ffn_up"))
        return _norm(x + _linear(y, weights, "ffn_down"), weights, "layer_output_norm")


# -- inside --------------------------------------------------------------------------------------


def _linear(x: Tensor, weights: Mapping[str, Tensor], name: str) -> Tensor:
    return functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])


def _norm(x: Tensor, weights: Mapping[str, Tensor], name: str) -> Tensor:
    weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
    return functional.layer_norm(x, x.shape[-1:], weight, bias, _EPSILON)
