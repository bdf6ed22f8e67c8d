"""Architecture of a decoder, read from its GGUF with llama.cpp's defaults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmaas_hooks import ConfigError
from llmaas_plugins.elastic.units import Blocks, blocks_in
from llmaas_plugins.model.gguf_header import GGUFHeader, read_header

__all__ = ["Architecture", "Attention", "architecture_of"]

_ENDS = {"token_embd.weight", "output_norm.weight", "output.weight", "output.bias"}
_ROOT_OF_WIDTH = {("gemma2", 46), ("gemma3", 62)}
"""The 27B models, by number of layers. They scale scores by the width of all heads, not of one."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention settings that can differ between the layers of a model.

    Attributes:
        window: Number of tokens attended to, including the token itself; None for all tokens
            before.
        rope_base: Base frequency of RoPE.
        rope_scale: Factor on the positions.
    """

    window: int | None
    rope_base: float
    rope_scale: float


@dataclass(frozen=True, slots=True)
class Architecture:
    """Architecture of a model of one of the supported families.

    Attributes:
        blocks: The model's units.
        n_rot: Number of channels of a head that RoPE rotates.
        epsilon: Epsilon of RMSNorm.
        score_scale: Factor on attention scores.
        score_cap: Soft limit of attention scores; 0 for no limit.
        logit_cap: Soft limit of logits; 0 for no limit.
        layers: Attention settings by layer.
    """

    blocks: Blocks
    n_rot: int
    epsilon: float
    score_scale: float
    score_cap: float
    logit_cap: float
    layers: tuple[Attention, ...]

    @property
    def rotates_neighbors(self) -> bool:
        """Whether RoPE pairs adjacent channels, instead of channels half a head apart."""
        return self.blocks.arch == "llama"

    @property
    def is_gemma(self) -> bool:
        """Whether the model is a Gemma.

        Gemmas use GELU, not SiLU, and scale embeddings by the root of their width.
        """
        return self.blocks.arch.startswith("gemma")


def architecture_of(path: Path) -> Architecture:
    """Read the architecture of a model file.

    Raises:
        ConfigError: The file is no GGUF, or its model cannot be elastic or cannot be computed in
            torch. The message says why.
        StoreError: The file cannot be read.
    """
    header = read_header(path)
    blocks = blocks_in(header, path)
    problem = _problem(header, blocks.arch)
    if problem:
        raise ConfigError(f"{path} cannot be computed in torch: {problem}.")
    get = _Fields(header, blocks.arch)
    n_heads = blocks.n_groups * blocks.heads_per_group
    is_wide = (blocks.arch, blocks.n_layers) in _ROOT_OF_WIDTH
    return Architecture(
        blocks=blocks,
        n_rot=int(get("rope.dimension_count", blocks.head_dim)),
        epsilon=float(get("attention.layer_norm_rms_epsilon", 0.0)),
        score_scale=(blocks.n_embd // n_heads if is_wide else blocks.head_dim) ** -0.5,
        score_cap=float(get("attn_logit_softcapping", 50.0)) if blocks.arch == "gemma2" else 0.0,
        logit_cap=_logit_cap(get, blocks.arch),
        layers=_layers(get, blocks),
    )


class _Fields:
    """Metadata of a GGUF under the prefix of its architecture."""

    def __init__(self, header: GGUFHeader, arch: str) -> None:
        self._fields, self._arch = header.fields, arch

    def __call__(self, key: str, default: Any) -> Any:
        """Return the value of ``key``."""
        return self._fields.get(f"{self._arch}.{key}", default)


def _problem(header: GGUFHeader, arch: str) -> str | None:
    """Return why torch cannot compute the model here, or None."""
    get = _Fields(header, arch)
    ends = _ENDS | ({"rope_freqs.weight"} if arch == "llama" else set())
    scaling = get("rope.scaling.type", "linear")
    for name in header.tensors:
        if name not in ends and (not name.startswith("blk.") or name.endswith(".scale")):
            return f"it has the tensor {name}"
    if scaling not in ("none", "linear"):
        return f"it scales RoPE with method {scaling!r}; supported are 'none' and 'linear'"
    if get("rope.scaling.attn_factor", 1.0) != 1.0:
        return "it has an attention factor for RoPE scaling (rope.scaling.attn_factor)"
    return None


def _logit_cap(get: _Fields, arch: str) -> float:
    defaults = {"gemma2": 30.0, "gemma3": 0.0}
    return float(get("final_logit_softcapping", defaults[arch])) if arch in defaults else 0.0


def _layers(get: _Fields, blocks: Blocks) -> tuple[Attention, ...]:
    arch, base = blocks.arch, float(get("rope.freq_base", 10000.0))
    factor = float(get("rope.scaling.factor", get("rope.scale_linear", 0.0)))
    is_scaled = factor > 0 and get("rope.scaling.type", "linear") == "linear"
    scale = 1 / factor if is_scaled else 1.0
    full = Attention(None, base, scale)
    n_window, n_pattern = {"gemma2": (4096, 2), "gemma3": (0, 6)}.get(arch, (0, 0))
    window = int(get("attention.sliding_window", n_window)) if n_pattern else 0
    if not window:
        return (full,) * blocks.n_layers
    own_base, own_scale = (base, scale) if arch == "gemma2" else (10000.0, 1.0)
    slid = Attention(window, float(get("rope.freq_base_swa", own_base)), own_scale)
    pattern = get("attention.sliding_window_pattern", n_pattern)
    if not isinstance(pattern, np.ndarray):
        n = int(pattern)
        pattern = [n == 0 or i % n < n - 1 for i in range(blocks.n_layers)]
    return tuple(slid if is_slid else full for is_slid in pattern)
