"""A Llama in numpy whose matrices read masked activations: the reference for sparse products."""

from __future__ import annotations

import numpy as np
from gguf import GGUFReader, quants


class MaskedLlama:
    """The reference model in 64-bit floats; slow and plain."""

    def __init__(self, path):
        reader = GGUFReader(path)
        self._weights = {
            tensor.name: quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
            for tensor in reader.tensors
        }
        meta = {name: field.contents() for name, field in reader.fields.items()}
        self._n_layer = meta["llama.block_count"]
        self._n_head = meta["llama.attention.head_count"]
        self._n_kv = meta["llama.attention.head_count_kv"]
        self._d = meta["llama.rope.dimension_count"]
        self._base = meta["llama.rope.freq_base"]
        self._epsilon = meta["llama.attention.layer_norm_rms_epsilon"]

    def logits(self, tokens, masked):
        """Return the logits of each token, shape ``(n, n_vocab)``.

        The matrices of a family read ``masked(layer, family, x)`` instead of ``x``.
        """
        x = self._weights["token_embd.weight"][tokens]
        for layer in range(self._n_layer):
            x = x + self._attention(layer, x, masked)
            x = x + self._feed_forward(layer, x, masked)
        head = self._weights.get("output.weight", self._weights["token_embd.weight"])
        return self._norm("output_norm", x) @ head.T

    def _attention(self, layer, x, masked):
        read = masked(layer, "attn_qkv", self._norm(f"blk.{layer}.attn_norm", x))
        q, k, v = (self._times(layer, f"attn_{name}", read) for name in "qkv")
        q, k = self._rotated(self._heads(q)), self._rotated(self._heads(k))
        k, v = (np.repeat(each, self._n_head // self._n_kv, 1) for each in (k, self._heads(v)))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(self._d)
        scores[:, ~np.tri(len(x), dtype=bool)] = -np.inf
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), v)
        return self._times(layer, "attn_output", masked(layer, "attn_output", self._flat(mixed)))

    def _feed_forward(self, layer, x, masked):
        read = masked(layer, "ffn_up", self._norm(f"blk.{layer}.ffn_norm", x))
        gate, up = (self._times(layer, f"ffn_{name}", read) for name in ("gate", "up"))
        return self._times(
            layer, "ffn_down", masked(layer, "ffn_down", gate / (1 + np.exp(-gate)) * up)
        )

    def _times(self, layer, name, x):
        return x @ self._weights[f"blk.{layer}.{name}.weight"].T

    def _norm(self, name, x):
        size = np.sqrt((x * x).mean(-1, keepdims=True) + self._epsilon)
        return x / size * self._weights.get(f"{name}.weight", 1.0)

    def _heads(self, x):
        return x.reshape(len(x), -1, self._d)

    def _flat(self, x):
        return x.reshape(len(x), -1)

    def _rotated(self, x):
        """Apply RoPE to neighboring pairs."""
        angles = np.outer(np.arange(len(x)), self._base ** (-np.arange(0, self._d, 2) / self._d))
        turn = np.exp(1j * angles)[:, None]
        turned = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
        return np.stack([turned.real, turned.imag], -1).reshape(x.shape)
