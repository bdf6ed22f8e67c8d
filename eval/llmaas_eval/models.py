"""Random-weight GGUF models of real shapes, for measurements of speed, never of quality."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, ReaderField, quants
from numpy.typing import NDArray
from tqdm import tqdm

from llmaas_plugins.reference_model import reference_model_path

__all__ = [
    "SHAPE_1B",
    "SHAPE_200M",
    "SHAPE_MOE",
    "SHAPE_TINY",
    "SHAPE_UNGROUPED",
    "Shape",
    "copy_field",
    "copy_tokenizer",
    "finish",
    "open_writer",
    "pack",
    "write_metadata",
    "write_random_model",
]


@dataclass(frozen=True, slots=True)
class Shape:
    """Dimensions of a llama-architecture model.

    Attributes:
        n_layer: Number of layers.
        n_embd: Width of the residual stream.
        n_head: Query heads per layer.
        n_head_kv: Key and value heads per layer.
        n_ff: Width of the feed-forward block, or of each expert.
        n_ctx: Training context length in the metadata.
        n_expert: Experts per layer, of which a token uses two; 0 for a dense model.
    """

    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    n_ff: int
    n_ctx: int
    n_expert: int = 0

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.n_embd // self.n_head


SHAPE_1B = Shape(n_layer=16, n_embd=2048, n_head=32, n_head_kv=8, n_ff=8192, n_ctx=8192)
"""The block shape of a 1 B model: 32 KiB of F16 KV per token."""
SHAPE_200M = Shape(n_layer=12, n_embd=1024, n_head=16, n_head_kv=8, n_ff=4096, n_ctx=4096)
"""The block shape of a 200 M model: 24 KiB of F16 KV per token."""
SHAPE_MOE = Shape(
    n_layer=16, n_embd=1024, n_head=16, n_head_kv=8, n_ff=2048, n_ctx=4096, n_expert=8
)
"""A mixture of 8 small experts: 0.8 B weights, of which each token uses 0.3 B."""
SHAPE_UNGROUPED = Shape(n_layer=16, n_embd=1024, n_head=8, n_head_kv=8, n_ff=2752, n_ctx=4096)
"""Llama-2-7B's block shape in a 200 M model: each query head has keys and values of its own."""
SHAPE_TINY = Shape(n_layer=1, n_embd=64, n_head=2, n_head_kv=1, n_ff=128, n_ctx=512)
"""A model with almost nothing to compute, to measure the overhead of a decode call."""


def write_random_model(
    path: Path,
    shape: Shape,
    weights: GGMLQuantizationType = GGMLQuantizationType.Q4_0,
    seed: int = 0,
    spread: Mapping[str, float] = MappingProxyType({}),
) -> Path:
    """Write a model of ``shape`` with random weights and the reference model's vocabulary.

    With plain random weights, no channel of the activations is consistently larger than another.
    ``spread`` scales the channels by lognormal factors to change that.

    Args:
        path: Output file; replaced atomically.
        shape: Dimensions of the model.
        weights: Type of the matrices; norms and expert routers are F32.
        seed: Seed of the random weights.
        spread: Standard deviation of the logarithm of the channel scales, by family of the
            matrices that read the channels (``"attn_qkv"``, ``"attn_output"``, ``"ffn_up"``,
            ``"ffn_down"``).

    Returns:
        ``path``.
    """
    writer = open_writer(path, "llama")
    write_metadata(writer, shape, "random")
    n_vocab = copy_tokenizer(writer)
    writer.add_vocab_size(n_vocab)
    rng = np.random.default_rng(seed)
    for name, dims in tqdm(_matrices(shape, n_vocab).items(), desc=path.name, disable=None):
        values = rng.standard_normal(dims, dtype=np.float32) * dims[-1] ** -0.5
        values *= _scales(rng, _WRITERS.get(name.split(".")[-2], ""), spread, dims[-2])[:, None]
        kind = GGMLQuantizationType.F32 if name.endswith("ffn_gate_inp.weight") else weights
        writer.add_tensor(name, quants.quantize(values, kind), raw_dtype=kind)
    for name in _norms(shape):
        family = _WRITERS.get(name.split(".")[-2], "")
        writer.add_tensor(name, _scales(rng, family, spread, shape.n_embd))
    return finish(writer, path)


_WRITERS = {
    "attn_norm": "attn_qkv", "attn_v": "attn_output", "ffn_norm": "ffn_up", "ffn_up": "ffn_down",
}  # fmt: skip
"""Family of the matrices that read each tensor's output; a row or value of it is one channel."""


def _scales(
    rng: np.random.Generator, family: str, spread: Mapping[str, float], n: int
) -> NDArray[np.float32]:
    """Return random scales of ``n`` channels; their expected mean square is 1."""
    sigma = spread.get(family, 0.0)
    if not sigma:
        return np.ones(n, np.float32)
    return np.exp(sigma * rng.standard_normal(n) - sigma**2).astype(np.float32)


def write_metadata(writer: GGUFWriter, shape: Shape, name: str) -> None:
    """Put the name and the dimensions of a model into ``writer``."""
    writer.add_name(name)
    writer.add_block_count(shape.n_layer)
    writer.add_context_length(shape.n_ctx)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(10000.0)
    if shape.n_expert:
        writer.add_expert_count(shape.n_expert)
        writer.add_expert_used_count(2)


def copy_tokenizer(writer: GGUFWriter) -> int:
    """Put the packaged model's tokenizer and chat template into ``writer``.

    Returns:
        Number of tokens in the vocabulary.
    """
    fields = _packaged_fields(reference_model_path())
    for key, entry in fields.items():
        if key.startswith("tokenizer."):
            copy_field(writer, entry)
    return len(fields["tokenizer.ggml.tokens"].data)


@functools.cache
def _packaged_fields(path: Path) -> Mapping[str, ReaderField]:
    return GGUFReader(path).fields


def copy_field(writer: GGUFWriter, entry: ReaderField) -> None:
    """Copy one metadata entry of another file to ``writer``."""
    kind, sub = (*entry.types, None)[:2]
    writer.add_key_value(entry.name, entry.contents(), kind, sub)


def open_writer(path: Path, arch: str) -> GGUFWriter:
    """Open a writer of a temporary file, which ``finish`` moves to ``path``."""
    return GGUFWriter(path.with_suffix(".partial"), arch)


def pack(path: Path) -> None:
    """Pack a model's weights, unless they are packed; the report goes to stderr."""
    from llmaas_plugins.cli.main import main as llmaas
    from llmaas_plugins.flash_weights.packed import packed_path

    if not packed_path(path).exists():
        with contextlib.redirect_stdout(sys.stderr):
            llmaas(["flash", "pack", str(path)])


def finish(writer: GGUFWriter, path: Path) -> Path:
    """Write the temporary file of ``writer``, then move it to ``path``."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(writer.path).replace(path)


def _matrices(shape: Shape, n_vocab: int) -> dict[str, tuple[int, ...]]:
    """Return the NumPy shape of every matrix, by name."""
    d, kv = shape.n_embd, shape.n_head_kv * shape.head_dim
    attention = {"attn_q": (d, d), "attn_k": (kv, d), "attn_v": (kv, d), "attn_output": (d, d)}
    layer: dict[str, tuple[int, ...]] = attention | _feed_forward(shape)
    layers = {
        f"blk.{i}.{name}.weight": dims for i in range(shape.n_layer) for name, dims in layer.items()
    }
    return {"token_embd.weight": (n_vocab, d), "output.weight": (n_vocab, d)} | layers


def _feed_forward(shape: Shape) -> dict[str, tuple[int, ...]]:
    wide, narrow = (shape.n_ff, shape.n_embd), (shape.n_embd, shape.n_ff)
    if not shape.n_expert:
        return {"ffn_gate": wide, "ffn_up": wide, "ffn_down": narrow}
    n = shape.n_expert
    return {
        "ffn_gate_inp": (n, shape.n_embd),
        "ffn_gate_exps": (n, *wide),
        "ffn_up_exps": (n, *wide),
        "ffn_down_exps": (n, *narrow),
    }


def _norms(shape: Shape) -> list[str]:
    blocks = [
        f"blk.{i}.{kind}_norm.weight" for i in range(shape.n_layer) for kind in ("attn", "ffn")
    ]
    return ["output_norm.weight", *blocks]
