"""Trained encoders as GGUF files that llama.cpp runs, with the last linear layer as metadata."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import ConfigError, forks
from llmaas_plugins.files.file_bytes import OPEN_FLAGS, as_store_error, sync_directory
from llmaas_plugins.files.temporary_folder import folder_beside
from llmaas_plugins.model.gguf_header import GGUFHeader, header_of, parse_header
from llmaas_plugins.short_prompts.encoder.body import HEAD_WIDTH, Body
from llmaas_plugins.short_prompts.encoder.windows import MOST_POSITIONS

__all__ = ["DIRECTORY", "GENERAL", "EncoderFile", "Head", "encoder_path", "find_encoder"]

DIRECTORY = Path("~/.cache/llmaas/prompts")
GENERAL = "general"
"""Name of the encoder that learned from summaries, for every model."""

_VERSION = 1
_PREFIX = "llmaas.encoder"
_KEPT_FLOAT = ("norm", "bias", "token_types", "position_embd")
"""Parts of names of weights that stay float32: they are no operands of products."""
_SPECIAL = {"unknown": "[UNK]", "seperator": "[SEP]", "cls": "[CLS]", "mask": "[MASK]"}
"""Special pieces by llama.cpp's names."""
_BLANK = "\u2581"
_MOST_OUTPUTS = 256
_LEAST_POSITIONS = 128


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """Last linear layer.

    Attributes:
        weight: Matrix, shape ``(n_outputs, n_embd)``.
        bias: Vector, shape ``(n_outputs,)``.
    """

    weight: NDArray[np.float32]
    bias: NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class EncoderFile:
    """Everything of a trained encoder's file that llama.cpp does not read.

    Attributes:
        head: Last linear layer.
        vocabulary: Word pieces by id.
        n_positions: Most pieces of a window, with the two that mark its ends.
        body: Digest of the files that the encoder was made of.
    """

    head: Head
    vocabulary: tuple[str, ...]
    n_positions: int
    body: str

    @classmethod
    def read(cls, path: Path) -> EncoderFile:
        """Read an encoder's file.

        Raises:
            ConfigError: The file is damaged, or is no encoder's.
            StoreError: The file cannot be read.
        """
        try:
            return cls._of(_header(path))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} is no encoder of prompts, or is damaged: {error}. "
                "`llmaas prompts learn` makes a new one."
            ) from error

    @classmethod
    def _of(cls, header: GGUFHeader) -> EncoderFile:
        fields = header.fields
        if (found := fields["general.architecture"]) != "bert":
            raise ValueError(f"its architecture is {found!r}, expected 'bert'")
        version, body = fields[f"{_PREFIX}.version"], fields[f"{_PREFIX}.body"]
        n_positions, tokens = fields["bert.context_length"], fields["tokenizer.ggml.tokens"]
        n_embd = fields["bert.embedding_length"]
        weight, bias = fields[f"{_PREFIX}.weight"], fields[f"{_PREFIX}.bias"]
        if version != _VERSION or type(n_positions) is not int or type(n_embd) is not int:
            raise ValueError(f"it has the version {version}, expected {_VERSION}")
        if not isinstance(body, str) or not isinstance(tokens, tuple):
            raise TypeError("it has no vocabulary")
        if not isinstance(weight, np.ndarray) or not isinstance(bias, np.ndarray):
            raise TypeError("it has no last layer")
        if n_positions < _LEAST_POSITIONS:
            raise ValueError(f"its windows have {n_positions} pieces")
        if not 1 <= bias.size <= _MOST_OUTPUTS or weight.size != bias.size * n_embd:
            raise ValueError(f"its last layer has {weight.size} weights and {bias.size} biases")
        if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
            raise ValueError("its last layer has numbers that are not finite")
        head = Head(weight.reshape(bias.size, n_embd).astype(np.float32), bias.astype(np.float32))
        vocabulary = tuple(map(_as_bert_has_it, tokens))
        return cls(head, vocabulary, min(n_positions, MOST_POSITIONS), body)

    @staticmethod
    def write(
        path: Path,
        body: Body,
        trained: Mapping[str, NDArray[np.float32]],
        head: Head,
        kind: str = "F16",
    ) -> None:
        """Write an encoder's file, replacing an existing one.

        Args:
            path: Path of the file; its folder exists.
            body: The encoder that was trained.
            trained: Weights that replace the body's.
            head: Last linear layer.
            kind: GGUF's name for the type of matrices. F16 is as fast as Q8_0 here, and more exact.

        Raises:
            StoreError: The file cannot be written.
        """
        weights = {**body.weights, **trained}
        with as_store_error(f"cannot write {path}"), folder_beside(path) as folder:
            made = folder / path.name
            _write(made, body, weights, head, kind)
            made.replace(path)
            sync_directory(path.parent)


def encoder_path(name: str) -> Path:
    """Return the path of an encoder's file.

    Args:
        name: Digest of the model whose answers it learned from, or ``GENERAL``.
    """
    return DIRECTORY.expanduser() / f"{name}.gguf"


def find_encoder(digest: str | None) -> Path | None:
    """Return the encoder that learned from a model's answers, else the general one, if any.

    Args:
        digest: Digest of the model, if it is known.
    """
    names = [GENERAL] if digest is None else [digest, GENERAL]
    return next((path for name in names if (path := encoder_path(name)).is_file()), None)


# -- inside --------------------------------------------------------------------------------------


def _header(path: Path) -> GGUFHeader:
    with as_store_error(f"cannot read {path}"):
        fd = os.open(path, os.O_RDONLY | OPEN_FLAGS)
        try:
            found = header_of(fd)
            n_bytes = os.fstat(fd).st_size
        finally:
            os.close(fd)
    if found is None:
        raise ValueError("it is no GGUF file")
    return parse_header(found[1], n_bytes)  # with its arrays of strings


def _write(
    path: Path, body: Body, weights: Mapping[str, NDArray[np.float32]], head: Head, kind: str
) -> None:
    with forks.postponed():  # a child could not finish another thread's import
        from gguf import GGMLQuantizationType, GGUFWriter, quants

    type_ = GGMLQuantizationType[kind]
    writer = GGUFWriter(path, "bert")
    _add_sizes(writer, body)
    _add_vocabulary(writer, body.vocabulary)
    writer.add_uint32(f"{_PREFIX}.version", _VERSION)
    writer.add_string(f"{_PREFIX}.body", body.digest)
    writer.add_array(f"{_PREFIX}.weight", head.weight.ravel().tolist())
    writer.add_array(f"{_PREFIX}.bias", head.bias.tolist())
    for name, values in weights.items():
        if any(part in name for part in _KEPT_FLOAT):
            writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
        else:
            writer.add_tensor(name, quants.quantize(values, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _add_sizes(writer: Any, body: Body) -> None:
    from gguf import PoolingType

    writer.add_context_length(len(body.weights["position_embd.weight"]))
    writer.add_embedding_length(body.n_embd)
    writer.add_feed_forward_length(len(body.weights["blk.0.ffn_up.weight"]))
    writer.add_block_count(body.n_layers)
    writer.add_head_count(body.n_embd // HEAD_WIDTH)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(PoolingType.NONE)


def _add_vocabulary(writer: Any, vocabulary: Sequence[str]) -> None:
    from gguf import TokenType

    kinds = [TokenType.CONTROL if _is_special(piece) else TokenType.NORMAL for piece in vocabulary]
    writer.add_tokenizer_model("bert")
    writer.add_token_type_count(2)
    writer.add_token_list([_as_llama_has_it(piece) for piece in vocabulary])
    writer.add_token_types(kinds)
    for name, piece in _SPECIAL.items():
        if piece in vocabulary:
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", vocabulary.index(piece))


def _is_special(piece: str) -> bool:
    return piece.startswith("[") and piece.endswith("]") and len(piece) > 2


def _as_llama_has_it(piece: str) -> str:
    """Return a piece as llama.cpp has it: those that begin a word are marked, not the others."""
    if _is_special(piece):
        return piece
    return piece[2:] if piece.startswith("##") else _BLANK + piece


def _as_bert_has_it(piece: str) -> str:
    if _is_special(piece):
        return piece
    return piece[1:] if piece.startswith(_BLANK) else f"##{piece}"
