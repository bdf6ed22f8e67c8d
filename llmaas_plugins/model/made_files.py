"""Files that were made of models and are loaded in their place, so that apps stay as they are.

``llmaas setup`` writes them to the table ``[models]`` of ``llmaas.toml``. Both files are identified
by their digests before anything is loaded in place of what the app named.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from llmaas_hooks import ConfigError, StoreError, hookimpl
from llmaas_plugins.model.digest import file_digest

__all__ = ["MadeFile", "MadeFiles", "file_in_place_of", "problem_of"]

_DIGEST = "^[0-9a-f]{64}$"

_log = logging.getLogger("llmaas.models")


class MadeFile(BaseModel):
    """Entry of the table ``[models]``, whose key is the path of the model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: Path = Field(description="File that is loaded in place of the model.")
    digest: str = Field(pattern=_DIGEST, description="Digest of the model.")
    file_digest: str = Field(pattern=_DIGEST, description="Digest of the file.")


class MadeFiles:
    """Plugin that loads a file which was made of a model in the model's place."""

    def __init__(self, made: Mapping[str, MadeFile]) -> None:
        """Take the files by the paths of their models."""
        self._made = _by_path(made)
        self._loaded: dict[str, str] = {}

    @hookimpl
    def llmaas_model_path(self, path: str) -> str | None:
        """Name the file that was made of a model, if both are still what they were."""
        made = self._made.get(_real(path))
        if made is None:
            return None
        problem = problem_of(Path(path), made)
        if problem is not None:
            _log.warning(
                "%s is loaded as it is, because %s. `llmaas setup %s` prepares it again.",
                path, problem, path,
            )  # fmt: skip
            return None
        file = made.file.expanduser()
        _log.info("%s is loaded in place of %s", file, path)
        self._loaded[path] = str(file)
        return str(file)

    @hookimpl
    def llmaas_status(self) -> dict[str, Any]:
        """Report which files were loaded in place of models."""
        return {"loaded": dict(self._loaded)}


def file_in_place_of(model: Path, made: Mapping[str, MadeFile], setup: str) -> Path:
    """Return the file that apps load in place of a model; the model itself if there is none.

    Args:
        model: Path of the model.
        made: Table ``[models]``.
        setup: Command that makes the file again, for the error.

    Raises:
        ConfigError: The file or the model is not what it was.
    """
    found = _by_path(made).get(_real(model))
    if found is None:
        return model
    if (problem := problem_of(model, found)) is not None:
        raise ConfigError(f"{problem}. {setup} prepares it again.")
    return found.file.expanduser()


def _by_path(made: Mapping[str, MadeFile]) -> dict[Path, MadeFile]:
    return {_real(model): one for model, one in made.items()}


def _real(path: str | Path) -> Path:
    """Return a path without symbolic links; a loop of them, which no file has, stays."""
    return Path(os.path.realpath(path))


def problem_of(model: Path, made: MadeFile) -> str | None:
    """Return why a file cannot be loaded in place of a model; None if it can."""
    return _changed(model, made.digest) or _changed(made.file.expanduser(), made.file_digest)


# -- inside --------------------------------------------------------------------------------------


def _changed(path: Path, digest: str) -> str | None:
    """Return why a file is not the one with a digest; None if it is."""
    if not path.is_file():
        return f"there is no file {path}"
    try:
        found = file_digest(path)
    except StoreError as error:
        return str(error)
    return None if found == digest else f"{path} was changed since"
