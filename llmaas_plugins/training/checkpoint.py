"""State of a training run in a file, so that a run that was stopped goes on exactly."""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from llmaas_hooks import ConfigError, StoreError
from llmaas_plugins.files.file_bytes import as_store_error, sync_directory
from llmaas_plugins.files.partial_file import taken

__all__ = ["Checkpoint", "read_checkpoint", "write_checkpoint"]

Arrays = Mapping[str, NDArray[np.float32]]

_MOST_ABOUT_BYTES = 4096
_MOST_EXTRA_BYTES = 4096
"""Most bytes of an array's own header."""


class _About(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    version: Literal[1]
    identity: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    step: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Checkpoint(NamedTuple):
    """State of a run.

    Attributes:
        step: Number of steps done.
        arrays: Parameters and the optimizer's moments; float32.
    """

    step: int
    arrays: Arrays


def write_checkpoint(path: Path, identity: str, checkpoint: Checkpoint) -> None:
    """Write a checkpoint, replacing an existing file.

    Args:
        path: Path of the checkpoint.
        identity: SHA-256 of everything that the run depends on.
        checkpoint: State of the run.

    Raises:
        StoreError: The file cannot be written.
    """
    about = _About(
        version=1, identity=identity, step=checkpoint.step, sha256=_digest(checkpoint.arrays)
    )
    text = np.frombuffer(about.model_dump_json().encode(), np.uint8)
    arrays: dict[str, Any] = {"about": text, **checkpoint.arrays}
    partial = path.with_name(f"{path.name}.partial")
    with as_store_error(f"cannot write {path}"), taken(partial) as fd:
        try:
            os.ftruncate(fd, 0)
            with os.fdopen(os.dup(fd), "wb") as file:
                np.savez(file, **arrays)
            os.fsync(fd)
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)


def read_checkpoint(
    path: Path, identity: str, shapes: Mapping[str, tuple[int, ...]]
) -> Checkpoint | None:
    """Return the checkpoint of a run, or None if there is no file.

    Args:
        path: Path of the checkpoint.
        identity: SHA-256 of everything that the run depends on.
        shapes: Shape of each array.

    Raises:
        ConfigError: The file is damaged, or of another run.
        StoreError: The file cannot be read.
    """
    if not path.exists():
        return None
    try:
        with as_store_error(f"cannot read {path}"):
            arrays = _arrays(path, shapes)
        about = _About.model_validate_json(arrays.pop("about").tobytes())
        _check(arrays, about, identity, shapes)
    except StoreError:
        raise
    except Exception as error:  # zipfile, its decoders and numpy raise many types
        raise ConfigError(
            f"{path} is no checkpoint of this run, or is damaged: {error}. Remove it to start over."
        ) from error
    return Checkpoint(about.step, arrays)


def _check(
    arrays: Arrays, about: _About, identity: str, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    if about.identity != identity:
        raise ValueError("it is of a run with other settings")
    for name, shape in shapes.items():
        found = arrays[name]
        if found.dtype != np.float32 or found.shape != shape or not np.isfinite(found).all():
            raise ValueError(f"its {name} are not {shape} finite numbers")
    if about.sha256 != _digest(arrays):
        raise ValueError("its checksum does not fit its content")


def _arrays(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, NDArray[Any]]:
    """Return the arrays of a file; refuse unexpected or oversized ones before reading them."""
    most = {f"{name}.npy": 4 * int(np.prod(shape)) for name, shape in shapes.items()}
    most["about.npy"] = _MOST_ABOUT_BYTES
    with zipfile.ZipFile(path) as archive:
        names = [info.filename for info in archive.infolist()]
        if sorted(names) != sorted(most):
            raise ValueError("its arrays are not those of this run")
        for info in archive.infolist():
            if info.file_size > most[info.filename] + _MOST_EXTRA_BYTES:
                raise ValueError(f"its {info.filename} is too large")
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def _digest(arrays: Arrays) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].shape}\n".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()
