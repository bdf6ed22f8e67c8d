"""Read and write files of scores, which are computed once and used at every preparation."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from llmaas_hooks import ConfigError, StoreError
from llmaas_plugins.elastic.units import Blocks, Calibration, Scores
from llmaas_plugins.files.file_bytes import as_store_error
from llmaas_plugins.files.partial_file import replacing
from llmaas_plugins.model.digest import file_digest
from llmaas_plugins.validation import validate_json

__all__ = ["read_scores", "scores_path", "write_scores"]

_ARRAYS = "groups", "neurons", "layers"
_MOST_ABOUT_BYTES = 4096
_MOST_EXTRA_BYTES = 4096
"""Most bytes of an array's own header."""


class _About(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    version: Literal[1]
    model: str
    sha256: Annotated[str, Field(max_length=64)]
    seed: int
    n_tokens: Annotated[int, Field(ge=0)]
    method: Annotated[str, Field(max_length=64)]


def scores_path(model: Path) -> Path:
    """Return the path of a model's scores."""
    return model.with_suffix(".scores.npz")


def write_scores(path: Path, scores: Scores, model: Path) -> None:
    """Write a model's scores, replacing an existing file.

    Args:
        path: Path of the scores.
        scores: Scores, including those of layers.
        model: Path of the model.

    Raises:
        StoreError: The scores cannot be written, or the model cannot be read.
    """
    calibration = scores.calibration
    about = _About(
        version=1,
        model=file_digest(model),
        sha256=calibration.sha256,
        seed=calibration.seed,
        n_tokens=calibration.n_tokens,
        method=calibration.method,
    )
    arrays: dict[str, Any] = {name: getattr(scores, name) for name in _ARRAYS}
    text = np.frombuffer(about.model_dump_json().encode(), np.uint8)
    with replacing(path) as fd, os.fdopen(os.dup(fd), "wb") as file:
        np.savez(file, about=text, **arrays)


def read_scores(path: Path, blocks: Blocks, model: Path) -> Scores:
    """Read the scores of a model.

    Raises:
        ConfigError: The scores are missing, damaged, or of another model.
        StoreError: The scores or the model cannot be read.
    """
    if not path.is_file():
        raise ConfigError(f"found no file {path}; `llmaas elastic score {model}` writes it.")
    try:
        with as_store_error(f"cannot read {path}"):
            arrays = _arrays(path, _shapes(blocks))
        about = validate_json(_About, arrays["about"].tobytes())
    except StoreError:
        raise
    except Exception as error:  # zipfile, its decoders and numpy raise many types
        raise ConfigError(
            f"{path} has no scores of {model}, or is damaged: {error}. `llmaas elastic score "
            f"{model}` writes new ones."
        ) from error
    if about.model != file_digest(model):
        raise ConfigError(
            f"{path} has the scores of another model than {model}. `llmaas elastic score` "
            "computes the scores of this model."
        )
    calibration = Calibration(about.sha256, about.seed, about.n_tokens, about.method)
    return Scores(arrays["groups"], arrays["neurons"], calibration, arrays["layers"])


# -- inside --------------------------------------------------------------------------------------


def _shapes(blocks: Blocks) -> dict[str, tuple[int, ...]]:
    n_layers = blocks.n_layers
    shapes = (n_layers, blocks.n_groups), (n_layers, blocks.n_ff), (n_layers,)
    return dict(zip(_ARRAYS, shapes, strict=True))


def _arrays(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, NDArray[Any]]:
    """Return the arrays of a file; refuse unexpected or oversized ones before reading them."""
    most = {f"{name}.npy": 8 * int(np.prod(shape)) for name, shape in shapes.items()}
    most["about.npy"] = _MOST_ABOUT_BYTES
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if info.file_size > most.get(info.filename, -_MOST_EXTRA_BYTES) + _MOST_EXTRA_BYTES:
                raise ValueError(f"its {info.filename} is unknown or too large")
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    missing = {"about", *shapes} - arrays.keys()
    if missing:
        raise ValueError(f"it has no {min(missing)}")
    for name, shape in shapes.items():
        array = arrays[name]
        if array.dtype != np.float64 or array.shape != shape or not np.isfinite(array).all():
            raise ValueError(f"its {name} are not {shape} finite numbers")
    return arrays
