"""Random models that are written tensor by tensor, in their final types."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from llmaas_eval.sizes.activity import Activity
from llmaas_eval.sizes.blocks import Stock
from llmaas_eval.sizes.layout import PlannedTensor, header_bytes, padding
from llmaas_eval.sizes.mixture import FILE_TYPES, tensor_types
from llmaas_eval.sizes.shapes import SizedShape
from llmaas_hooks import ConfigError
from llmaas_plugins.files.partial_file import replaced
from llmaas_plugins.model.gguf_entries import entry
from llmaas_plugins.model.gguf_header import parse_header

__all__ = ["SizedModel", "plan_model", "write_sized"]

_CHUNK_BYTES = 8 << 20
_LOGIT_SCALE = 4.0
"""Standard deviation of logits: the likeliest of 100,000 tokens then has some percent."""
_SIGNS = np.array([-1, 1], np.float32)
_BIASES = {"attn_q": np.float32(1), "attn_k": np.float32(1), "attn_v": np.float32(0.1)}
"""Standard deviations of biases. Larger ones of values would make all predictions equal."""


class SizedModel(NamedTuple):
    """A model to write.

    Attributes:
        shape: Dimensions of the model.
        tensors: Tensors in the order of the file.
        header: All bytes before the first tensor's.
    """

    shape: SizedShape
    tensors: tuple[PlannedTensor, ...]
    header: bytes

    @property
    def n_bytes(self) -> int:
        """Size of the file."""
        sizes = (tensor.n_bytes for tensor in self.tensors)
        return len(self.header) + sum(n + len(padding(n)) for n in sizes)


def plan_model(name: str, shape: SizedShape, file_type: str, vocabulary: Path) -> SizedModel:
    """Choose the types of a model's tensors, and make its header.

    Args:
        name: Name of the model in the metadata.
        shape: Dimensions of the model.
        file_type: Key in ``FILE_TYPES``.
        vocabulary: GGUF file whose tokenizer the model gets.

    Raises:
        ConfigError: The vocabulary cannot be used.
        LlmaasError: llama.cpp could not quantize such a model.
    """
    tokenizer, n_vocab = _tokenizer(vocabulary)
    types = tensor_types(shape, n_vocab, file_type)
    tensors = tuple(
        PlannedTensor(each, types[each], dims) for each, dims in shape.tensors(n_vocab).items()
    )
    entries = [
        entry("general.architecture", shape.arch),
        entry("general.name", name),
        entry("general.file_type", FILE_TYPES[file_type]),
        entry("general.quantization_version", 2),
        *(entry(key, value) for key, value in shape.metadata(n_vocab).items()),
        *tokenizer,
    ]
    return SizedModel(shape, tensors, header_bytes(entries, tensors))


def write_sized(path: Path, model: SizedModel, activity: Activity, seed: int = 0) -> Iterator[int]:
    """Write a model with random weights; yield the numbers of bytes written.

    Args:
        path: Output file; replaced atomically.
        model: The planned model.
        activity: Statistics of channels, heads and neurons.
        seed: Seed of the random weights.

    Raises:
        StoreError: The file cannot be written.
    """
    return replaced(path, _contents(model, _Draws(model.shape, activity, seed)))


# -- inside --------------------------------------------------------------------------------------


def _tokenizer(path: Path) -> tuple[list[bytes], int]:
    """Return the entries of a file's tokenizer, and its number of tokens."""
    content = path.read_bytes()
    try:
        header = parse_header(content, len(content))
    except ValueError as error:
        raise ConfigError(f"{path} is no vocabulary: {error}.") from error
    tokens = header.fields.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, tuple):
        raise ConfigError(f"{path} has no tokenizer.ggml.tokens, expected a vocabulary of a model.")
    spans = {key: span for key, span in header.spans.items() if key.startswith("tokenizer.")}
    return [content[first:last] for first, last in spans.values()], len(tokens)


def _contents(model: SizedModel, draws: _Draws) -> Iterator[memoryview]:
    yield memoryview(model.header)
    for tensor in model.tensors:
        for rows in draws.rows_of(tensor):
            yield rows.reshape(-1).view(np.uint8).data
        yield memoryview(padding(tensor.n_bytes))


class _Draws:
    """Random weights of a model."""

    def __init__(self, shape: SizedShape, activity: Activity, seed: int) -> None:
        self._shape, self._activity = shape, activity
        self._rng = np.random.default_rng(seed)
        self._outliers = self._rng.choice(shape.n_embd, activity.n_outliers, replace=False)
        self._stocks = dict[GGMLQuantizationType, Stock]()

    def rows_of(self, tensor: PlannedTensor) -> Iterator[NDArray[np.generic]]:
        """Yield the rows of a tensor, some at a time."""
        if tensor.type == GGMLQuantizationType.F32:
            yield self._floats(tensor)
            return
        if tensor.type not in self._stocks:
            self._stocks[tensor.type] = Stock(tensor.type, self._rng)
        stock, scales = self._stocks[tensor.type], self._row_scales(tensor)
        n_at_once = max(1, _CHUNK_BYTES // tensor.row_bytes)
        for first in range(0, len(scales), n_at_once):
            yield stock.rows(scales[first : first + n_at_once], tensor.shape[0])

    def _row_scales(self, tensor: PlannedTensor) -> NDArray[np.float32]:
        """Return the standard deviation of each row's weights."""
        n, rng, shape = tensor.n_rows, self._rng, self._shape
        kind, width = tensor.name.split(".")[-2], np.float32(tensor.shape[0] ** -0.5)
        if kind == "attn_v":
            return width * self._activity.value_rows(rng, shape.n_head_kv, shape.head_dim)
        if kind.startswith("ffn_up"):
            return width * self._activity.neuron_rows(rng, n)
        is_output = kind == "output" or (shape.is_tied and kind == "token_embd")
        return np.full(n, width * (_LOGIT_SCALE if is_output else 1), np.float32)

    def _floats(self, tensor: PlannedTensor) -> NDArray[np.float32]:
        """Return a tensor that is not quantized."""
        *_, kind, part = tensor.name.split(".")
        rng, n = self._rng, tensor.shape[0]
        if kind == "rope_freqs" and self._shape.rope_factors is not None:
            return self._shape.rope_factors.divisors(self._shape.head_dim, self._shape.rope_base)
        if part == "bias":
            return rng.standard_normal(n, np.float32) * _BIASES[kind]
        if kind in ("attn_norm", "ffn_norm"):
            return self._activity.norm(rng, kind, self._outliers, n)
        if kind == "output_norm" and self._shape.is_tied:
            return rng.permutation(np.resize(_SIGNS, n))  # else tokens repeat
        if kind.endswith("norm"):
            return np.ones(n, np.float32)
        return rng.standard_normal((tensor.n_rows, n), np.float32) * np.float32(n**-0.5)
