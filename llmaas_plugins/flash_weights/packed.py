"""Packed file: a model's matrices as ggml-cpu repacks them for one kind of processor.

The file is a GGUF of an architecture that stock llama.cpp does not load. Each tensor starts at a
multiple of 4 KiB, so reads need no copy. It has the name, type and shape of the model's tensor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from llmaas_hooks import ConfigError, TensorInfo
from llmaas_plugins.flash_weights.container import ContainerHeader, Part, Value
from llmaas_plugins.flash_weights.container_file import Bytes, ContainerFile, Kind
from llmaas_plugins.flash_weights.container_writer import Step, write_container
from llmaas_plugins.flash_weights.model_weights import ModelWeights, digest_of

__all__ = ["PACKED_FILE", "packed_path", "packed_problem", "streamable", "write_packed"]

PACKED_FILE = Kind("packed file", "llmaas-packed", 2, "llmaas flash pack")

_FORMAT, _MODEL, _LAYOUTS = "llmaas.format", "llmaas.model", "llmaas.packed.layouts"

Repack = Callable[[TensorInfo, Bytes], Bytes]


def streamable(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the matrices used in products; embeddings only if they are also the output matrix."""
    is_tied = "output.weight" not in tensors
    return {
        name: info
        for name, info in tensors.items()
        if info.is_matrix and (is_tied or not name.startswith("token_embd."))
    }


def packed_path(model: str | os.PathLike[str]) -> Path:
    """Return the path of a model's packed file, which is beside the model."""
    return Path(model).with_suffix(".packed")


def packed_problem(
    path: Path, model: str | os.PathLike[str], tensors: Mapping[str, TensorInfo]
) -> str | None:
    """Return why a packed file cannot replace the model's matrices here, or None if it can.

    Raises:
        StoreError: The file is no packed file, or is damaged.
    """
    with ContainerFile(path, PACKED_FILE) as file:
        found = file.header
    digest = digest_of(model)
    if found.fields.get(_MODEL) != digest:
        return (
            "it was made from another model file, or the model file has changed since, or it was "
            "made by an earlier version"
        )
    expected = _header(digest, streamable(tensors))
    if found.parts != expected.parts:
        return "its tensors differ from the model's"
    if found != expected:
        return "it was made on another kind of processor, or for another version of llama.cpp"
    return None


def write_packed(
    model: Path, path: Path, tensors: Mapping[str, TensorInfo], repack: Repack
) -> Iterator[int]:
    """Write a model's packed file, replacing an existing one; yield progress in bytes.

    Progress is twice the bytes of the matrices, which are written and read back.

    A run that was stopped is continued by the next one. The file appears under its name only after
    all of it was written, read back and compared.

    Raises:
        ConfigError: The model has no matrices.
        StoreError: The file cannot be read or written, or another process writes it.
    """
    infos = streamable(tensors)
    if not infos:
        raise ConfigError(f"{model} has no matrices to stream.")
    with ModelWeights(model) as weights:
        steps = (
            Step((name,), partial(_repacked, name, info, weights, repack), info.n_bytes)
            for name, info in infos.items()
        )
        header = _header(weights.digest, infos)
        yield from write_container(path, header, weights.unchanged(steps))


def _repacked(name: str, info: TensorInfo, weights: ModelWeights, repack: Repack) -> list[Bytes]:
    return [repack(info, weights.read(name))]


def _header(model: str, infos: Mapping[str, TensorInfo]) -> ContainerHeader:
    fields: dict[str, Value] = {
        _FORMAT: PACKED_FILE.version,
        _MODEL: model,
        _LAYOUTS: tuple(f"{info.layout:016x}" for info in infos.values()),
    }
    parts = tuple(Part(name, info.type, _shape(info)) for name, info in infos.items())
    return ContainerHeader(PACKED_FILE.architecture, fields, parts)


def _shape(info: TensorInfo) -> tuple[int, ...]:
    columns, rows, matrices = info.shape
    return (matrices, rows, columns) if matrices > 1 else (rows, columns)
