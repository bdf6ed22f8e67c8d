"""Repack weights as ggml-cpu does on this processor."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import TensorInfo
from llmaas_patches.native.claims import tensor_places
from llmaas_patches.native.library import load_library

__all__ = ["model_tensors", "repack"]

Bytes = NDArray[np.uint8]


def model_tensors(path: str | os.PathLike[str]) -> Mapping[str, TensorInfo]:
    """Return the tensors of a model file by name; empty if the file is not a GGUF file.

    Raises:
        IncompatibleError: This llama-cpp-python cannot be hooked.
    """
    places = tensor_places(load_library(), [os.fspath(path)])
    return {name: place.info for name, place in places.items()}


def repack(info: TensorInfo, plain: Bytes) -> Bytes:
    """Return a weight's bytes in the layout for products; unchanged if ``info.layout`` is 0.

    Raises:
        ValueError: There is no such layout for the weight's type and shape.
    """
    if info.layout == 0:
        return plain
    ffi, lib = load_library()
    packed = np.empty(info.n_bytes, np.uint8)
    arguments: list[Any] = [ffi.from_buffer("uint8_t[]", array) for array in (plain, packed)]
    status = lib.llmaas_repack(info.type, ffi.new("int64_t[]", info.shape), *arguments)
    if status != 0:
        raise ValueError(f"no layout for type {info.type}, shape {info.shape} (status {status})")
    return packed
