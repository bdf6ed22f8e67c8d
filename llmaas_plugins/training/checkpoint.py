"""State of a training run in a file, so that a run that was stopped goes on exactly."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from llmaas_hooks import ConfigError
from llmaas_plugins.files.array_file import read_arrays, write_arrays
from llmaas_plugins.validation import validate

__all__ = ["Checkpoint", "read_checkpoint", "write_checkpoint"]

Arrays = Mapping[str, NDArray[np.float32]]


class _About(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    version: Literal[1]
    identity: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    step: Annotated[int, Field(ge=0)]


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
    about = _About(version=1, identity=identity, step=checkpoint.step)
    write_arrays(path, about.model_dump(), checkpoint.arrays)


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
    n_bytes = 4 * sum(int(np.prod(shape)) for shape in shapes.values())
    try:
        found, arrays = read_arrays(path, n_bytes)
        about = validate(_About, found)
        _check(arrays, about, identity, shapes)
    except ValueError as error:
        raise ConfigError(
            f"{path} is no checkpoint of this run, or is damaged: {error}. Remove it to start over."
        ) from error
    return Checkpoint(about.step, arrays)


def _check(
    arrays: Mapping[str, NDArray[Any]],
    about: _About,
    identity: str,
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    if about.identity != identity:
        raise ValueError("it is of a run with other settings")
    if arrays.keys() != shapes.keys():
        raise ValueError("its arrays are not those of this run")
    for name, shape in shapes.items():
        found = arrays[name]
        if found.dtype != np.float32 or found.shape != shape or not np.isfinite(found).all():
            raise ValueError(f"its {name} are not {shape} finite numbers")
