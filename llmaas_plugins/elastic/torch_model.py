"""Decoder in torch that reads each layer's weights from the GGUF when the layer is computed.

Only one layer, or one chunk of the vocabulary, is in memory as float32 beside the mapped file.
Gates remove units: the output of a removed unit is multiplied by 0, and nothing else changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from gguf import quants
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from llmaas_plugins.elastic.architecture import architecture_of
from llmaas_plugins.elastic.units import Widths
from llmaas_plugins.model.gguf_header import read_header

__all__ = ["Decoder", "Gates", "Weights", "Windows", "gates_of"]

Windows = NDArray[np.int32]
"""Tokens, shape ``(n_windows, n_tokens)``; each row is a separate text."""

Weights = Mapping[str, Tensor]
"""Weights of one layer in float32, by name within the layer, such as ``attn_q.weight``."""

_CHUNK = 1 << 23
"""Most values of the output matrix, or of logits, in memory at once."""

_ROWS = 256
"""Rows of a matrix to dequantize at once."""


class Gates(NamedTuple):
    """Factors on the outputs of a layer's units.

    Attributes:
        groups: Factors on the attention output of each KV group; shape ``(n_groups,)`` or
            ``(n_tokens, n_groups)``.
        neurons: Factors on the outputs of the MLP's neurons; shape ``(n_ff,)`` or ``(n_tokens,
            n_ff)``.
    """

    groups: Tensor
    neurons: Tensor


def gates_of(widths: Widths, decoder: Decoder) -> list[Gates]:
    """Return gates by layer that keep only the leading units."""
    groups, neurons = torch.arange(decoder.blocks.n_groups), torch.arange(decoder.blocks.n_ff)
    return [
        Gates((groups < int(n_groups)).float(), (neurons < int(n_neurons)).float())
        for n_groups, n_neurons in zip(widths.groups, widths.neurons, strict=True)
    ]


class Decoder:
    """Model of one of the families that can be elastic.

    It is the one model in torch, for scores, for studies and for training. A subclass may replace
    ``weights`` (to keep them, or to train them), ``product`` (to watch or change operands), and
    ``positions`` and ``visible`` (for several texts after one prompt).

    Attributes:
        architecture: The model's architecture.
        blocks: The model's units.
        n_vocab: Size of the vocabulary.
        device: Device of the weights, which computes.
    """

    device = torch.device("cpu")

    def __init__(self, path: Path) -> None:
        """Map a GGUF into memory.

        Raises:
            ConfigError: The file is no GGUF, or its model cannot be elastic or cannot be computed
                here.
            StoreError: The file cannot be read.
        """
        self.architecture = architecture_of(path)
        self.blocks = self.architecture.blocks
        self._tensors = read_header(path).tensors
        self._bytes = np.memmap(path, np.uint8, "r")
        self._output = "output" if "output.weight" in self._tensors else "token_embd"
        self.n_vocab = self._tensors[f"{self._output}.weight"].n_rows

    def weights(self, layer: int) -> Weights:
        """Read the weights of a layer."""
        prefix = f"blk.{layer}."
        names = [name for name in self._tensors if name.startswith(prefix)]
        return {name.removeprefix(prefix): self._read(name) for name in names}

    def run(self, windows: Windows, gates: Sequence[Gates] | None = None) -> Tensor:
        """Return the output of the last layer, shape ``(n_windows, n_tokens, n_embd)``.

        Args:
            windows: Tokens to evaluate.
            gates: Gates by layer.
        """
        x = self.embed(windows)
        for layer in range(self.blocks.n_layers):
            x = self.apply(layer, x, None if gates is None else gates[layer])
        return x

    def embed(self, windows: Windows) -> Tensor:
        """Return the input of the first layer, shape ``(n_windows, n_tokens, n_embd)``."""
        distinct, places = np.unique(windows, return_inverse=True)
        x = self._read("token_embd.weight", distinct)[
            torch.from_numpy(places.reshape(windows.shape))
        ]
        return x * x.shape[-1] ** 0.5 if self.architecture.is_gemma else x

    def apply(self, layer: int, inputs: Tensor, gates: Gates | None = None) -> Tensor:
        """Return the outputs of a layer, shaped as ``inputs``; read its weights only for this call.

        Args:
            layer: Index of the layer.
            inputs: Inputs of the layer, shape ``(n_windows, n_tokens, n_embd)``.
            gates: Factors on the outputs of the layer's units.
        """
        weights = self.weights(layer)
        with torch.no_grad():
            return torch.stack([self.block(layer, weights, x, gates) for x in inputs])

    def block(self, layer: int, weights: Weights, x: Tensor, gates: Gates | None = None) -> Tensor:
        """Return the output of a layer, shaped as ``x``.

        Args:
            layer: Index of the layer.
            weights: Weights of the layer.
            x: Input of the layer, shape ``(…, n_tokens, n_embd)``; each window's first row is at
                position 0.
            gates: Factors on the outputs of the layer's units; only for a single window.
        """
        y = self.attend(layer, weights, self.norm(x, weights["attn_norm.weight"]))
        if gates is not None:
            y = (y.unflatten(-1, (gates.groups.shape[-1], -1)) * gates.groups[..., None]).flatten(
                -2
            )
        y = self.product(layer, weights, "attn_output", y)
        x = x + self._post(y, weights, "post_attention_norm")
        y = self.activate(layer, weights, self.norm(x, weights["ffn_norm.weight"]))
        y = y if gates is None else _gated(y, gates.neurons)
        y = self.product(layer, weights, "ffn_down", y)
        return x + self._post(y, weights, "post_ffw_norm")

    def attend(self, layer: int, weights: Weights, x: Tensor) -> Tensor:
        """Return attention before the output projection, shape ``(…, n_tokens, n_heads * dim)``."""
        a, width = self.architecture, self.blocks.head_dim
        q, k, v = (
            self.product(layer, weights, f"attn_{name}", x)
            .unflatten(-1, (-1, width))
            .transpose(-3, -2)
            for name in ("q", "k", "v")
        )
        if "attn_q_norm.weight" in weights:
            q = self.norm(q, weights["attn_q_norm.weight"])
            k = self.norm(k, weights["attn_k_norm.weight"])
        n_tokens = x.shape[-2]
        turns = self._turns(layer, n_tokens)
        mask = self.visible(layer, n_tokens)
        q, k = self._rotate(q, turns), self._rotate(k, turns)
        if a.score_cap:
            y = _capped_attention(q, k, v, mask, a.score_scale, a.score_cap)
        else:
            if is_single := q.dim() == 3:  # torch refuses grouped queries without a batch
                q, k, v = q[None], k[None], v[None]
            y = functional.scaled_dot_product_attention(
                q, k, v, mask, scale=a.score_scale, enable_gqa=True
            )
            y = y[0] if is_single else y
        return y.transpose(-3, -2).flatten(-2)

    def positions(self, n_tokens: int) -> Tensor:
        """Return the position of each token of a window, shape ``(n_tokens,)``."""
        return torch.arange(n_tokens, device=self.device)

    def visible(self, layer: int, n_tokens: int) -> Tensor:
        """Return whether a token (row) of a window attends to another (column)."""
        mask = torch.ones(n_tokens, n_tokens, dtype=torch.bool, device=self.device).tril()
        window = self.architecture.layers[layer].window
        return mask if window is None else mask.triu(1 - window)

    def activate(self, layer: int, weights: Weights, x: Tensor) -> Tensor:
        """Return the outputs of the MLP's neurons, shape ``(…, n_tokens, n_ff)``."""
        gate = self.product(layer, weights, "ffn_gate", x)
        is_gemma = self.architecture.is_gemma
        gate = functional.gelu(gate, approximate="tanh") if is_gemma else functional.silu(gate)
        return gate * self.product(layer, weights, "ffn_up", x)

    def product(self, layer: int, weights: Weights, name: str, x: Tensor) -> Tensor:  # noqa: ARG002
        """Return ``x`` multiplied by one of the layer's matrices, plus the bias if it has one."""
        return functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the root-mean-square norm of ``x``, scaled by ``weight``."""
        return functional.rms_norm(x, x.shape[-1:], weight, self.architecture.epsilon)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits for an output of the last layer; shape ``(n_tokens, n_vocab)``."""
        return torch.cat([part for _, part in self._logits(self._last_norm(x))], -1)

    def losses(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each target in nats; shape ``(n_tokens,)``.

        Args:
            x: Output of the last layer, shape ``(n_tokens, n_embd)``.
            targets: The token after each position.
        """
        normalizers, found = self._normalizers(self._last_norm(x), targets)
        return normalizers - found

    def loss_gradient(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the gradient of the sum of ``losses`` with respect to ``x``, shaped as ``x``."""
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = self._last_norm(x)
        cut = y.detach().requires_grad_()
        normalizers, _ = self._normalizers(cut, targets)
        places = torch.arange(len(x), device=self.device)
        with torch.enable_grad():
            for start, logits in self._logits(cut):
                errors = torch.exp(logits.detach() - normalizers[:, None])
                here = (targets >= start) & (targets < start + logits.shape[-1])
                errors[places[here], targets[here] - start] -= 1
                logits.backward(errors)
        y.backward(cut.grad)
        return x.grad

    def _normalizers(self, y: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-sum-exp of the logits, and the logits of the targets."""
        total, found = y.new_full((len(y),), -torch.inf), y.new_zeros(len(y))
        for start, logits in self._logits(y.detach()):
            total = torch.logaddexp(total, logits.logsumexp(-1))
            here = (targets >= start) & (targets < start + logits.shape[-1])
            found[here] = logits[here, targets[here] - start]
        return total, found

    def _logits(self, y: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the logits by chunks of the vocabulary, each with its first token."""
        name = f"{self._output}.weight"
        n_vocab, cap = self._tensors[name].n_rows, self.architecture.logit_cap
        step = max(1, _CHUNK // max(y.shape))
        for start in range(0, n_vocab, step):
            rows = slice(start, start + step)
            logits = y @ self._read(name, rows).t()
            if "output.bias" in self._tensors:
                logits = logits + self._read("output.bias")[rows]
            yield start, cap * torch.tanh(logits / cap) if cap else logits

    def _last_norm(self, x: Tensor) -> Tensor:
        return self.norm(x, self._read("output_norm.weight"))

    def _post(self, x: Tensor, weights: Weights, name: str) -> Tensor:
        """Apply the norm after attention or the MLP, where the family has one."""
        weight = weights.get(f"{name}.weight")
        return x if weight is None else self.norm(x, weight)

    def _turns(self, layer: int, n_tokens: int) -> tuple[Tensor, Tensor]:
        """Return RoPE's cosines and sines by position and pair."""
        own, n_rot = self.architecture.layers[layer], self.architecture.n_rot
        pairs = torch.arange(0, n_rot, 2, dtype=torch.float64, device=self.device)
        rates = own.rope_base ** -(pairs / n_rot)
        if "rope_freqs.weight" in self._tensors:
            rates = rates / self._read("rope_freqs.weight")
        angles = torch.outer(self.positions(n_tokens) * own.rope_scale, rates)
        return angles.cos().float(), angles.sin().float()

    def _rotate(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        n_rot, (cos, sin) = self.architecture.n_rot, (part.to(x.dtype) for part in turns)
        x, rest = x[..., :n_rot], x[..., n_rot:]
        if self.architecture.rotates_neighbors:
            a, b = x[..., 0::2], x[..., 1::2]
            turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
        else:
            a, b = x.chunk(2, -1)
            turned = torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
        return torch.cat((turned, rest), -1) if rest.shape[-1] else turned

    def _read(self, name: str, rows: slice | NDArray[np.int32] = slice(None)) -> Tensor:
        tensor = self._tensors[name]
        content = self._bytes[tensor.at : tensor.at + tensor.n_bytes]
        if len(tensor.shape) == 1:
            vector = quants.dequantize(content, tensor.type).astype(np.float32)
            return torch.from_numpy(vector).to(self.device)
        content = content.reshape(tensor.n_rows, -1)[rows]
        values = torch.empty(len(content), tensor.n_columns)
        for start in range(0, len(content), _ROWS):
            some = slice(start, start + _ROWS)
            values.numpy()[some] = quants.dequantize(content[some], tensor.type)
        return values.to(self.device)


def _gated(x: Tensor, gates: Tensor) -> Tensor:
    """Multiply each unit's equal share of the channels by its gate."""
    return (x.unflatten(-1, (gates.shape[-1], -1)) * gates[..., None]).flatten(-2)


def _capped_attention(  # noqa: PLR0913, PLR0917 -- same arguments as torch's attention
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, cap: float
) -> Tensor:
    """Compute attention with softly limited scores; shaped as ``q``."""
    scores = q.unflatten(-3, (k.shape[-3], -1)) @ k.transpose(-1, -2).unsqueeze(-3) * scale
    scores = (cap * torch.tanh(scores / cap)).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ v.unsqueeze(-3)).flatten(-4, -3)
