"""The packed file: a model's matrices as ggml-cpu repacks them on one kind of processor.

It is a GGUF file of an architecture that stock llama.cpp does not load. Each tensor starts at a
multiple of 4 KiB, so that reads need no copy, and has the name, type and shape it has in the model.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, ReaderTensor
from numpy.typing import NDArray

from llmaas_hooks import ConfigError, StoreError, TensorInfo
from llmaas_plugins.model_digest import file_digest

__all__ = ["packed_path", "packed_problem", "streamable", "write_packed"]

_ARCHITECTURE = "llmaas-packed"
_MODEL, _LAYOUTS = "llmaas.packed.model", "llmaas.packed.layouts"
_ALIGNMENT = 4096

Bytes = NDArray[np.uint8]
Repack = Callable[[TensorInfo, Bytes], Bytes]


def streamable(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Matrices that are multiplied with; embeddings are looked up row by row."""
    return {
        name: info
        for name, info in tensors.items()
        if info.is_matrix and not name.startswith("token_embd.")
    }


def packed_path(model: str | os.PathLike[str]) -> Path:
    """Where a model's packed file is: beside it."""
    return Path(model).with_suffix(".packed")


def packed_problem(
    path: Path, model: str | os.PathLike[str], tensors: Mapping[str, TensorInfo]
) -> str | None:
    """Why a packed file cannot stand for a model here; ``None``: it can.

    Raises:
        StoreError: It is no packed file, or is damaged.
    """
    found_model, found = _read_header(path)
    if found_model != file_digest(os.fspath(model)):
        return "it was made from another model file, or the model file was changed since"
    expected = streamable(tensors)
    if found.keys() != expected.keys():
        return "it has other tensors than the model"
    if any(found[name] != info.layout for name, info in expected.items()):
        return "it was made on another kind of processor, or for another version of llama.cpp"
    return None


def _read_header(path: Path) -> tuple[str, dict[str, int]]:
    """Which model it is of, and each tensor's layout."""
    try:
        reader = GGUFReader(path)
        model = reader.fields[_MODEL].contents()
        layouts = reader.fields[_LAYOUTS].contents()
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise StoreError(
            f"{path} is not a packed file, or is damaged: {error}. Make one with `llmaas flash "
            "pack`."
        ) from error
    names = [tensor.name for tensor in reader.tensors]
    if len(layouts) != len(names):
        raise StoreError(f"{path} has {len(names)} tensors and {len(layouts)} layouts.")
    return model, {name: int(layout, 16) for name, layout in zip(names, layouts, strict=True)}


def write_packed(
    model: Path, path: Path, tensors: Mapping[str, TensorInfo], repack: Repack
) -> Iterator[int]:
    """Write the packed file of a model, in place of the one that is there; yields bytes done.

    Nothing is there before all of it is written, read back and compared.

    Raises:
        ConfigError: The model has no matrices.
        StoreError: It cannot be read or written.
    """
    infos = streamable(tensors)
    if not infos:
        raise ConfigError(f"{model} has no matrices to stream.")
    partial = None
    try:
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=f"{path.name}.", delete=False
        ) as file:
            partial = Path(file.name)
            yield from _write(model, partial, infos, repack)
            os.fsync(file.fileno())
        partial.chmod(0o644)
        partial.replace(path)
    except OSError as error:
        raise StoreError(f"cannot pack {model} to {path}: {error}.") from error
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)


def _write(
    model: Path, path: Path, infos: Mapping[str, TensorInfo], repack: Repack
) -> Iterator[int]:
    reader = {tensor.name: tensor for tensor in GGUFReader(model).tensors}
    writer = GGUFWriter(path, _ARCHITECTURE)
    writer.add_custom_alignment(_ALIGNMENT)
    writer.add_string(_MODEL, file_digest(os.fspath(model)))
    writer.add_array(_LAYOUTS, [f"{info.layout:016x}" for info in infos.values()])
    for name, info in infos.items():
        quantised = GGMLQuantizationType(info.type)
        data = reader[name].data
        writer.add_tensor_info(name, data.shape, data.dtype, info.n_bytes, quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, info in infos.items():
        writer.write_tensor_data(repack(info, _bytes(reader[name])))
        yield info.n_bytes
    writer.close()
    _compare(path, reader, infos, repack)


def _compare(
    path: Path, model: Mapping[str, ReaderTensor], infos: Mapping[str, TensorInfo], repack: Repack
) -> None:
    written = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    for name, info in infos.items():
        if not np.array_equal(repack(info, _bytes(model[name])), _bytes(written[name])):
            raise OSError(f"{name} was not read back as it was written")


def _bytes(tensor: ReaderTensor) -> Bytes:
    return np.ascontiguousarray(tensor.data).view(np.uint8).reshape(-1)
