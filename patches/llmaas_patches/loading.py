"""The files that a model was really loaded from, and the metadata that the app replaced.

Files are looked at just before llama.cpp opens them and again when it is done. Whoever hashes them
later compares with that, so that a file that was replaced or changed meanwhile is never taken for
the one in memory.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_cpp import llama_cpp

from llmaas_hooks import FileStamp, ModelFile, ModelLoad, Override
from llmaas_patches.ledger import address

if TYPE_CHECKING:
    from llmaas_patches.host import Host

__all__ = ["look_at", "model_load", "wrap_load_adapter"]

_VALUES = {
    llama_cpp.LLAMA_KV_OVERRIDE_TYPE_INT: "val_i64",
    llama_cpp.LLAMA_KV_OVERRIDE_TYPE_FLOAT: "val_f64",
    llama_cpp.LLAMA_KV_OVERRIDE_TYPE_BOOL: "val_bool",
    llama_cpp.LLAMA_KV_OVERRIDE_TYPE_STR: "val_str",
}
_MOST_OVERRIDES = 1 << 16


def look_at(paths: Iterable[str]) -> tuple[ModelFile, ...]:
    """Return files with their present states."""
    return tuple(ModelFile(str(Path(path).absolute()), _stamp(path)) for path in paths)


def _look_again(files: Iterable[ModelFile]) -> tuple[ModelFile, ...]:
    """Return the files, without the states of those that changed since."""
    return tuple(
        file if file.stamp == _stamp(file.path) else file._replace(stamp=None) for file in files
    )


def model_load(load: ModelLoad, model: int, *, is_listed: bool) -> ModelLoad:
    """Return how a model was opened, now that it is.

    Args:
        load: What plugins saw before. The app may use its structures again, so they are copied.
        model: The model's address.
        is_listed: Whether the app named every file; else, only the metadata tells whether the name
            of a split means one.
    """
    files = load.files if is_listed else load.files[: _n_splits(model)]
    params = type(load.params).from_buffer_copy(load.params)
    return ModelLoad(load.path, params, _look_again(files), _overrides(load.params))


def wrap_load_adapter(host: Host, original: Callable[..., Any]) -> Callable[..., Any]:
    """``llama_adapter_lora_init``: note which file it was."""

    @functools.wraps(original)
    def llama_adapter_lora_init(model: Any, path_lora: Any) -> Any:
        files = look_at([os.fsdecode(path_lora)])
        adapter = original(model, path_lora)
        load = host.loads.get(address(model))
        if adapter is not None and load is not None:
            load.adapters.extend(_look_again(files))
        return adapter

    return llama_adapter_lora_init


def _stamp(path: str) -> FileStamp | None:
    try:
        return FileStamp.of(Path(path).stat())
    except (OSError, ValueError):  # a name may have a zero byte
        return None


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
        # llama.cpp takes the first entry of a key
        found.setdefault(key, value.decode(errors="replace") if type(value) is bytes else value)
    return found
