"""Shapes of models with 7 to 12 billion weights, as their makers published them.

Each shape names the vocabulary file of llama.cpp that it uses. Where llama.cpp has no vocabulary of
the model, ``stands_in`` says which one is used instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["SHAPES", "RopeFactors", "SizedShape"]

_FEED_FORWARD_STEP = 256
"""Columns of a K-quant's block."""


class RopeFactors(NamedTuple):
    """Llama 3.1's scaling of RoPE, which becomes the tensor ``rope_freqs``.

    Attributes:
        factor: Divisor of the slow frequencies.
        low: Wavelengths above ``original_context / low`` tokens are scaled completely.
        high: Wavelengths below ``original_context / high`` tokens are not scaled.
        original_context: Context length that the model was first trained for.
    """

    factor: float
    low: float
    high: float
    original_context: int

    def divisors(self, head_dim: int, base: float) -> NDArray[np.float32]:
        """Return the divisor of each frequency of a head."""
        frequencies = base ** (-np.arange(0, head_dim, 2) / head_dim)
        waves = self.original_context * frequencies / (2 * math.pi)
        smooth = np.clip((waves - self.low) / (self.high - self.low), 0, 1)
        return (1 / ((1 - smooth) / self.factor + smooth)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class SizedShape:
    """Dimensions and metadata of a published model.

    Attributes:
        arch: llama.cpp's name of the architecture.
        vocabulary: Name of llama.cpp's vocabulary file, without ``ggml-vocab-`` and ``.gguf``.
        n_layer: Number of layers.
        n_embd: Width of the residual stream.
        n_head: Query heads of a layer.
        n_head_kv: Key and value heads of a layer.
        head_dim: Width of a head.
        n_ff: Width of the feed-forward block, or of each expert.
        n_ctx: Training context length.
        rope_base: Base of RoPE's frequencies.
        rms_eps: Epsilon of the norms.
        n_expert: Experts of a layer, of which a token uses two; 0 for a dense model.
        is_tied: Whether the token embeddings are the output matrix, too.
        has_biases: Whether queries, keys and values have biases.
        has_post_norms: Whether attention and feed-forward block are followed by norms.
        rope_factors: Scaling of RoPE; None if there is none.
        keys: Further numbers of the metadata, by key without the architecture.
        stands_in: Deviation from the published model, as a sentence; empty if there is none.
    """

    arch: str
    vocabulary: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    n_ctx: int
    rope_base: float = 10000.0
    rms_eps: float = 1e-5
    n_expert: int = 0
    is_tied: bool = False
    has_biases: bool = False
    has_post_norms: bool = False
    rope_factors: RopeFactors | None = None
    keys: Mapping[str, int | float] = field(default_factory=dict)
    stands_in: str = ""

    def shrunk(self, by: int, most_layers: int | None = None) -> SizedShape:
        """Return the shape with all widths divided by ``by``, a divisor of the heads of keys.

        Layers stay, unless there are more than ``most_layers``. The width of a head stays. The
        feed-forward width is rounded up to blocks of K-quants.
        """
        return replace(
            self,
            n_layer=min(self.n_layer, most_layers or self.n_layer),
            n_embd=self.n_embd // by,
            n_head=self.n_head // by,
            n_head_kv=self.n_head_kv // by,
            n_ff=-(-self.n_ff // (by * _FEED_FORWARD_STEP)) * _FEED_FORWARD_STEP,
        )

    def metadata(self, n_vocab: int) -> dict[str, int | float]:
        """Return the numbers of the file's metadata, by key."""
        found: dict[str, int | float] = {
            "block_count": self.n_layer,
            "context_length": self.n_ctx,
            "embedding_length": self.n_embd,
            "feed_forward_length": self.n_ff,
            "attention.head_count": self.n_head,
            "attention.head_count_kv": self.n_head_kv,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": self.rms_eps,
            "rope.dimension_count": self.head_dim,
            "rope.freq_base": self.rope_base,
            "vocab_size": n_vocab,
            **self.keys,
        }
        if self.n_expert:
            found |= {"expert_count": self.n_expert, "expert_used_count": 2}
        return {f"{self.arch}.{key}": value for key, value in found.items()}

    def tensors(self, n_vocab: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors by name, in GGUF's order, columns first."""
        d = self.n_embd
        ends: dict[str, tuple[int, ...]] = {"token_embd.weight": (d, n_vocab)}
        ends["output_norm.weight"] = (d,)
        if not self.is_tied:
            ends["output.weight"] = (d, n_vocab)
        if self.rope_factors is not None:
            ends["rope_freqs.weight"] = (self.head_dim // 2,)
        layer = self._attention() | self._feed_forward()
        layers = {
            f"blk.{i}.{name}": dims for i in range(self.n_layer) for name, dims in layer.items()
        }
        return ends | layers

    def _attention(self) -> dict[str, tuple[int, ...]]:
        d, q, kv = self.n_embd, self.n_head * self.head_dim, self.n_head_kv * self.head_dim
        found: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (d,),
            "attn_q.weight": (d, q),
            "attn_k.weight": (d, kv),
            "attn_v.weight": (d, kv),
            "attn_output.weight": (q, d),
        }
        if self.has_biases:
            found |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
        if self.has_post_norms:
            found["post_attention_norm.weight"] = (d,)
        return found

    def _feed_forward(self) -> dict[str, tuple[int, ...]]:
        d, ff, n = self.n_embd, self.n_ff, self.n_expert
        found: dict[str, tuple[int, ...]] = {"ffn_norm.weight": (d,)}
        if self.has_post_norms:
            found["post_ffw_norm.weight"] = (d,)
        if not n:
            wide = {"ffn_gate.weight": (d, ff), "ffn_up.weight": (d, ff)}
            return found | wide | {"ffn_down.weight": (ff, d)}
        return found | {
            "ffn_gate_inp.weight": (d, n),
            "ffn_gate_exps.weight": (d, ff, n),
            "ffn_up_exps.weight": (d, ff, n),
            "ffn_down_exps.weight": (ff, d, n),
        }


SHAPES: Mapping[str, SizedShape] = {
    "llama-3-8b": SizedShape(
        "llama", "llama-bpe", 32, 4096, 32, 8, 128, 14336, 131072, 500000.0,
        rope_factors=RopeFactors(8.0, 1.0, 4.0, 8192),
        stands_in="Context length and RoPE factors are Llama 3.1's.",
    ),
    "llama-2-7b": SizedShape("llama", "llama-spm", 32, 4096, 32, 32, 128, 11008, 4096),
    "qwen2.5-7b": SizedShape(
        "qwen2", "qwen2", 28, 3584, 28, 4, 128, 18944, 32768, 1000000.0, 1e-6, has_biases=True,
        stands_in="Qwen2's vocabulary stands in: 151,936 rows, and Qwen2.5-7B has 152,064.",
    ),
    "gemma-2-9b": SizedShape(
        "gemma2", "gemma-4", 42, 3584, 16, 8, 256, 14336, 8192, rms_eps=1e-6,
        is_tied=True, has_post_norms=True,
        keys={"attention.sliding_window": 4096, "attn_logit_softcapping": 50.0,
              "final_logit_softcapping": 30.0},
        stands_in="Gemma 4's vocabulary stands in: 262,144 tokens, and Gemma 2 has 256,000.",
    ),
    "mixtral-8-layers": SizedShape(
        "llama", "llama-spm", 8, 4096, 32, 8, 128, 14336, 32768, 1000000.0, n_expert=8,
        stands_in="A quarter of Mixtral 8x7B's 32 layers, so that the file fits the disk.",
    ),
}  # fmt: skip
"""Shapes by the name that commands use."""
