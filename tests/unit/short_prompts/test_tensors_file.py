"""Safetensors files, which come from a package and are read without trust."""

from __future__ import annotations

import json
import os
import struct

import numpy as np
import pytest
from tiny_encoders import safetensors

from llmaas_hooks import ConfigError, StoreError
from llmaas_plugins.short_prompts.encoder.tensors_file import read_tensors

ARRAYS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.float32)}


def with_header(header, n_data=40, n_claimed=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    n = len(text) if n_claimed is None else n_claimed
    return struct.pack("<Q", n) + text + bytes(n_data)


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_tensors_are_read_and_others_than_float32_are_left_out(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors({**ARRAYS, "positions": np.arange(3)}))
    found = read_tensors(path)
    assert found.keys() == ARRAYS.keys()
    for name, values in ARRAYS.items():
        np.testing.assert_array_equal(found[name], values)


@pytest.mark.parametrize(
    "content",
    {
        "empty": b"",
        "short": b"\x01\0\0",
        "no header": struct.pack("<Q", 8),
        "longer header than the file": with_header({}, n_claimed=1 << 19),
        "huge header": with_header({}, n_claimed=(1 << 64) - 1),
        "no JSON": with_header(b"{]"),
        "nested JSON": with_header(b"[" * 100_000 + b"]" * 100_000),
        "no object": with_header([1]),
        "no entry": with_header({"a": 3}),
        "no shape": with_header({"a": {"dtype": "F32", "data_offsets": [0, 4]}}),
        "negative size": with_header({"a": entry([-1], 0, 4)}),
        "size that is no integer": with_header({"a": entry([True], 0, 4)}),
        "other size": with_header({"a": entry([9], 0, 4)}),
        "huge size": with_header({"a": entry([1 << 40, 1 << 40], 0, 4)}),
        "beyond the end": with_header({"a": entry([20], 0, 80)}),
        "before the start": with_header({"a": entry([1], -4, 0)}),
        "backwards": with_header({"a": entry([0], 8, 4)}),
        "three offsets": with_header({"a": {**entry([1], 0, 4), "data_offsets": [0, 4, 8]}}),
        "overlapping": with_header({str(i): entry([10], 0, 40) for i in range(3)}),
        "not finite": safetensors({"a": np.array([1, np.nan], np.float32)}),
    }.items(),
    ids=lambda item: item[0],
)
def test_damaged_files_are_refused(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content[1])
    with pytest.raises(ConfigError, match=r"is no safetensors file, or is damaged: .*Install"):
        read_tensors(path)


def test_pipes_and_missing_files_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="regular file"):
        read_tensors(tmp_path / "pipe")
    with pytest.raises(StoreError, match="No such file"):
        read_tensors(tmp_path / "missing")
