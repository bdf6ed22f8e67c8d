"""Tiny random-weight models of many architectures, to test which ones the suite supports.

Each has two or three layers with the tensors and metadata of its architecture, quantized matrices,
and the packaged model's tokenizer and chat template. The text that such a model writes is noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, quants
from numpy.typing import NDArray

from llmaas_eval.models import copy_tokenizer, finish, open_writer

__all__ = ["FAMILIES", "Family", "write_family", "write_lora"]

_D, _HEADS, _KV_HEADS, _FF, _VOCAB, _CTX = 256, 4, 2, 512, 4096, 1024
_HEAD = _D // _HEADS  # 64: long enough that llama.cpp rotates quantized cells
_KV = _KV_HEADS * _HEAD
_EXPERTS, _EXPERT_FF = 4, 256
_INNER, _STATE, _SSM_HEADS, _KERNEL = 2 * _D, 64, 8, 4
_CONV = _INNER + 2 * _STATE
_LATENT, _ROPE = 64, 32

Tensors = Mapping[str, tuple[int, ...]]


def _weights(**shapes: tuple[int, ...]) -> Tensors:
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def _vectors(size: int, *names: str) -> Tensors:
    return dict.fromkeys(names, (size,))


_ENDS = _weights(token_embd=(_VOCAB, _D), output_norm=(_D,))
_OUT = _weights(attn_output=(_D, _D), attn_norm=(_D,))
_QKV = _weights(attn_q=(_D, _D), attn_k=(_KV, _D), attn_v=(_KV, _D))
_QKV_BIASES = {"attn_q.bias": (_D,), "attn_k.bias": (_KV,), "attn_v.bias": (_KV,)}
_QK_NORMS = _weights(attn_q_norm=(_HEAD,), attn_k_norm=(_HEAD,))
_ATTENTION = {**_QKV, **_OUT}
_FFN = _weights(ffn_gate=(_FF, _D), ffn_up=(_FF, _D), ffn_down=(_D, _FF), ffn_norm=(_D,))
_FUSED_FFN = _weights(ffn_up=(2 * _FF, _D), ffn_down=(_D, _FF), ffn_norm=(_D,))
_ROUTED = _weights(
    ffn_gate_inp=(_EXPERTS, _D),
    ffn_gate_exps=(_EXPERTS, _EXPERT_FF, _D),
    ffn_up_exps=(_EXPERTS, _EXPERT_FF, _D),
    ffn_down_exps=(_EXPERTS, _D, _EXPERT_FF),
)
_MOE = {**_ROUTED, **_weights(ffn_norm=(_D,))}
_SINKS = {
    **_weights(attn_sinks=(_HEADS,), post_attention_norm=(_D,)),
    "attn_output.bias": (_D,),
    "ffn_gate_inp.bias": (_EXPERTS,),
    "ffn_gate_exps.bias": (_EXPERTS, _EXPERT_FF),
    "ffn_up_exps.bias": (_EXPERTS, _EXPERT_FF),
    "ffn_down_exps.bias": (_EXPERTS, _D),
}
_MLA = _weights(
    attn_norm=(_D,),
    attn_q_a=(_LATENT, _D),
    attn_q_a_norm=(_LATENT,),
    attn_q_b=(_HEADS * (_HEAD + _ROPE), _LATENT),
    attn_kv_a_mqa=(_LATENT + _ROPE, _D),
    attn_kv_a_norm=(_LATENT,),
    attn_k_b=(_HEADS, _LATENT, _HEAD),
    attn_v_b=(_HEADS, _HEAD, _LATENT),
    attn_output=(_D, _D),
)
_INDEXER = {
    "indexer.k_norm.weight": (_HEAD,),
    "indexer.k_norm.bias": (_HEAD,),
    "indexer.proj.weight": (_HEADS, _D),
    "indexer.attn_k.weight": (_HEAD, _D),
    "indexer.attn_q_b.weight": (_HEADS * _HEAD, _LATENT),
}
_MAMBA2 = {
    **_weights(
        attn_norm=(_D,),
        ssm_in=(_INNER + _CONV + _SSM_HEADS, _D),
        ssm_conv1d=(_CONV, _KERNEL),
        ssm_norm=(1, _INNER),
        ssm_out=(_D, _INNER),
    ),
    "ssm_conv1d.bias": (_CONV,),
    "ssm_dt.bias": (_SSM_HEADS,),
    "ssm_a": (_SSM_HEADS, 1),
    "ssm_d": (_SSM_HEADS, 1),
}
_BERT = {
    **_QKV,
    **_weights(attn_output=(_D, _D), ffn_up=(_FF, _D), ffn_down=(_D, _FF)),
    **_vectors(_D, "attn_output_norm.weight", "attn_output_norm.bias"),
    **_vectors(_D, "layer_output_norm.weight", "layer_output_norm.bias"),
}
_BERT_ENDS = {
    **_weights(token_embd=(_VOCAB, _D), position_embd=(_CTX, _D), token_types=(2, _D)),
    **_vectors(_D, "token_embd_norm.weight", "token_embd_norm.bias"),
}
_GEMMA_NORMS = _weights(post_attention_norm=(_D,), post_ffw_norm=(_D,))
_HEAD_KEYS = {"attention.key_length": _HEAD, "attention.value_length": _HEAD}
_SSM_KEYS = {
    "ssm.conv_kernel": _KERNEL,
    "ssm.inner_size": _INNER,
    "ssm.state_size": _STATE,
    "ssm.time_step_rank": _SSM_HEADS,
    "ssm.group_count": 1,
}
_MOE_KEYS = {"expert_count": _EXPERTS, "expert_used_count": 2}
_MLA_KEYS = {
    **_MOE_KEYS,
    "leading_dense_block_count": 2,
    "expert_feed_forward_length": _EXPERT_FF,
    "expert_shared_count": 1,
    "attention.head_count_kv": 1,
    "attention.q_lora_rank": _LATENT,
    "attention.kv_lora_rank": _LATENT,
    "attention.key_length": _LATENT + _ROPE,
    "attention.value_length": _LATENT,
    "attention.key_length_mla": _HEAD + _ROPE,
    "attention.value_length_mla": _HEAD,
    "rope.dimension_count": _ROPE,
}
_F32 = (
    *("norm", "bias", "gate_inp", "indexer.proj", "token_types", "position_embd"),
    *("ssm_conv1d", "ssm_a", "ssm_d"),
)
_BASE_KEYS: Mapping[str, Any] = {
    "context_length": _CTX,
    "embedding_length": _D,
    "feed_forward_length": _FF,
    "attention.head_count": _HEADS,
    "attention.head_count_kv": _KV_HEADS,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 10000.0,
    "vocab_size": _VOCAB,
}


@dataclass(frozen=True, slots=True)
class Family:
    """Tensors and metadata of a small model of one architecture.

    Attributes:
        arch: llama.cpp's name for the architecture.
        layers: Tensors of each layer: NumPy shape by name within the layer.
        keys: Metadata in addition to a plain decoder's. Keys beginning with ``tokenizer.`` are
            complete; all others are written with the architecture's prefix.
        ends: Tensors outside the layers. Without an output matrix, llama.cpp uses the token
            embeddings.
    """

    arch: str
    layers: tuple[Tensors, ...]
    keys: Mapping[str, Any] = field(default_factory=dict)
    ends: Tensors = field(default_factory=lambda: _ENDS)

    def tensors(self) -> Tensors:
        """Return the shapes of all tensors of the file, by name."""
        return {
            **self.ends,
            **{f"blk.{i}.{n}": s for i, layer in enumerate(self.layers) for n, s in layer.items()},
        }


def _uniform(*tables: Tensors, n_layers: int = 2) -> tuple[Tensors, ...]:
    layer = {name: shape for table in tables for name, shape in table.items()}
    return (layer,) * n_layers


FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama", _uniform(_ATTENTION, _FFN)),
    "qwen2": Family("qwen2", _uniform(_ATTENTION, _QKV_BIASES, _FFN)),
    "qwen3": Family("qwen3", _uniform(_ATTENTION, _QK_NORMS, _FFN)),
    "phi3": Family("phi3", _uniform(_weights(attn_qkv=(_D + 2 * _KV, _D)), _OUT, _FUSED_FFN)),
    "llama-moe": Family(
        "llama", _uniform(_ATTENTION, _MOE), {**_MOE_KEYS, "feed_forward_length": _EXPERT_FF}
    ),
    "qwen3moe": Family(
        "qwen3moe",
        _uniform(_ATTENTION, _QK_NORMS, _MOE),
        {**_MOE_KEYS, "expert_feed_forward_length": _EXPERT_FF},
    ),
    "deepseek2": Family("deepseek2", _uniform(_MLA, _FFN), _MLA_KEYS),
    "deepseek32": Family(
        "deepseek32",
        _uniform(_MLA, _FFN, _INDEXER),
        {
            **_MLA_KEYS,
            "expert_gating_func": 1,
            "attention.indexer.head_count": _HEADS,
            "attention.indexer.key_length": _HEAD,
            "attention.indexer.top_k": 32,
        },
    ),
    "gpt-oss": Family(
        "gpt-oss",
        _uniform(_ATTENTION, _QKV_BIASES, _ROUTED, _SINKS),
        {**_MOE_KEYS, "expert_feed_forward_length": _EXPERT_FF, "attention.sliding_window": 32},
        {**_ENDS, **_weights(output=(_VOCAB, _D))},
    ),
    "gemma": Family("gemma", _uniform(_ATTENTION, _FFN), _HEAD_KEYS),
    "gemma2": Family(
        "gemma2",
        _uniform(_ATTENTION, _GEMMA_NORMS, _FFN),
        {
            **_HEAD_KEYS,
            "attention.sliding_window": 64,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": Family(
        "gemma3",
        _uniform(_ATTENTION, _QK_NORMS, _GEMMA_NORMS, _FFN, n_layers=3),
        {
            **_HEAD_KEYS,
            "attention.sliding_window": 64,
            "attention.sliding_window_pattern": 3,
        },
    ),
    "mamba2": Family("mamba2", _uniform(_MAMBA2), _SSM_KEYS),
    "granitehybrid": Family(
        "granitehybrid",
        ({**_MAMBA2, **_FFN}, {**_ATTENTION, **_FFN}, {**_MAMBA2, **_FFN}),
        {**_SSM_KEYS, "attention.head_count_kv": [0, _KV_HEADS, 0]},
    ),
    "qwen2vl": Family(
        "qwen2vl",
        _uniform(_ATTENTION, _QKV_BIASES, _FFN),
        {"rope.dimension_sections": [8, 12, 12, 0]},
    ),
    "bert": Family(
        "bert",
        _uniform(_BERT),
        {
            "attention.layer_norm_epsilon": 1e-6,
            "attention.causal": False,
            "tokenizer.ggml.token_type_count": 2,
            "pooling_type": 1,
        },
        _BERT_ENDS,
    ),
}
"""All families by name; decoders can also be used for embeddings."""


def write_family(
    name: str,
    path: Path,
    *,
    seed: int = 0,
    weights: GGMLQuantizationType = GGMLQuantizationType.Q8_0,
) -> Path:
    """Write a model of family ``name`` with random weights.

    Args:
        name: Key in ``FAMILIES``.
        path: Output file; replaced atomically.
        seed: Seed of the random weights.
        weights: Type of the matrices; vectors and small tensors are F32.

    Returns:
        ``path``.
    """
    family = FAMILIES[name]
    writer = open_writer(path, family.arch)
    keys = {**_BASE_KEYS, "block_count": len(family.layers), **family.keys}
    for key, value in keys.items():
        _add_key(writer, key if key.startswith("tokenizer.") else f"{family.arch}.{key}", value)
    copy_tokenizer(writer)
    rng = np.random.default_rng(seed)
    for tensor, shape in family.tensors().items():
        values = _values(rng, tensor, shape)
        if _is_matrix(tensor, shape):
            writer.add_tensor(tensor, quants.quantize(values, weights), raw_dtype=weights)
        else:
            writer.add_tensor(tensor, values)
    return finish(writer, path)


def write_lora(name: str, path: Path, *, seed: int = 0, rank: int = 8) -> Path:
    """Write a random LoRA adapter for the query and value matrices of family ``name``.

    Args:
        name: Key in ``FAMILIES``; the family must have separate query and value matrices.
        path: Output file; replaced atomically.
        seed: Seed of the random weights.
        rank: Rank of the adapter; also its alpha, so the scale is 1.

    Returns:
        ``path``.
    """
    family = FAMILIES[name]
    writer = open_writer(path, family.arch)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    rng = np.random.default_rng(seed)
    for tensor, shape in family.tensors().items():
        if tensor.endswith(("attn_q.weight", "attn_v.weight")):
            rows, columns = shape
            writer.add_tensor(f"{tensor}.lora_a", _values(rng, tensor, (rank, columns)))
            writer.add_tensor(f"{tensor}.lora_b", _values(rng, tensor, (rows, rank)))
    return finish(writer, path)


def _values(rng: np.random.Generator, tensor: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    noise = rng.standard_normal(shape, dtype=np.float32)
    if tensor.endswith("ssm_a"):
        return -np.abs(noise)
    if "norm" in tensor and tensor.endswith("weight"):
        return np.float32(1) + noise / np.float32(16)
    return noise * np.float32(shape[-1] ** -0.5)


def _is_matrix(tensor: str, shape: tuple[int, ...]) -> bool:
    """Return whether converters quantize ``tensor``: a matrix multiplied with whole batches."""
    return len(shape) > 1 and not any(part in tensor for part in _F32)


def _add_key(writer: GGUFWriter, key: str, value: Any) -> None:
    kinds = {
        bool: GGUFValueType.BOOL,
        int: GGUFValueType.UINT32,
        float: GGUFValueType.FLOAT32,
        str: GGUFValueType.STRING,
        list: GGUFValueType.ARRAY,
    }
    writer.add_key_value(key, value, kinds[type(value)])
