"""Record the files that a model was loaded from, and the metadata that the app overrode.

File stamps are taken just before llama.cpp opens the files and again after loading. Code that later
hashes a file compares the stamps, so that a file that was replaced or changed meanwhile is never
taken for the one in memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp

from llmaas_hooks import FileStamp, ModelFile, ModelLoad, Override

__all__ = ["look_again", "look_at", "model_load", "replaced"]

_VALUES = {
    llama_cpp.LLAMA_KV_OVERRIDE_TYPE_INT: "val_i64",
    llama_cpp.LLAMA_KV_OVERRIDE_TYPE_FLOAT: "val_f64",
    llama_cpp.LLAMA_KV_OVERRIDE_TYPE_BOOL: "val_bool",
    llama_cpp.LLAMA_KV_OVERRIDE_TYPE_STR: "val_str",
}
_MOST_OVERRIDES = 1 << 16


def look_at(paths: Iterable[str]) -> tuple[ModelFile, ...]:
    """Return files with their current stamps."""
    return tuple(ModelFile(str(Path(path).absolute()), FileStamp.at(path)) for path in paths)


def look_again(files: Iterable[ModelFile]) -> tuple[ModelFile, ...]:
    """Return the files; those that changed since lose their stamp."""
    return tuple(
        file if file.stamp == FileStamp.at(file.path) else file._replace(stamp=None)
        for file in files
    )


def replaced(files: Iterable[ModelFile]) -> str | None:
    """Return the path of the first file that was replaced or changed, or None."""
    return next((file.path for file in files if file.stamp != FileStamp.at(file.path)), None)


def model_load(load: ModelLoad, model: int, *, is_listed: bool, is_claimed: bool) -> ModelLoad:
    """Return a record of how a model was opened.

    Args:
        load: Record that plugins saw before loading. Its structures are copied, because the app
            may reuse them.
        model: Address of the model.
        is_listed: Whether the app named every file. If not, the metadata tells whether a file that
            is named like a split really is one.
        is_claimed: Whether the model was loaded with the weights that plugins claimed.
    """
    files = load.files if is_listed else load.files[: _n_splits(model)]
    params = type(load.params).from_buffer_copy(load.params)
    overrides = _overrides(load.params)
    return ModelLoad(
        load.path,
        params,
        look_again(files),
        overrides,
        is_claimed=is_claimed,
        in_place_of=load.in_place_of,
    )


def _n_splits(model: int) -> int:
    value = ctypes.create_string_buffer(32)
    llama_cpp.llama_model_meta_val_str(model, b"split.count", value, len(value))
    return max(1, int(value.value)) if value.value.isdigit() else 1


def _overrides(params: Any) -> dict[str, Override]:
    found: dict[str, Override] = {}
    entries: Sequence[Any] = params.kv_overrides
    for i in range(_MOST_OVERRIDES if entries else 0):
        key = entries[i].key.decode(errors="replace")
        if not key:
            break
        value = getattr(entries[i].value, _VALUES.get(entries[i].tag, "val_i64"))
        # llama.cpp uses the first entry of a key
        found.setdefault(key, value.decode(errors="replace") if type(value) is bytes else value)
    return found
