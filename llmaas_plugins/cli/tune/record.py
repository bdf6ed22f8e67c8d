"""File beside the configuration that keeps what was measured, and why each plugin is on or off."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from llmaas_plugins.cli.tune.figures import Figures
from llmaas_plugins.cli.tune.verdicts import Verdict
from llmaas_plugins.files.partial_file import write_bytes
from llmaas_plugins.run_record import run_record
from llmaas_plugins.validation import validate_json

__all__ = ["Kept", "Record", "key_of", "record_path"]

_MOST_BYTES = 1 << 20


class Kept(BaseModel):
    """Part that was measured.

    Attributes:
        key: Name of what was measured: model, settings, texts and machine.
        seconds: Seconds that it took.
        figures: Its figures.
        verdict: Verdict on it, which also depends on the parts before it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    seconds: float
    figures: Figures
    verdict: Verdict | None = None


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1]
    run: dict[str, Any]
    model: str
    parts: dict[str, Kept]


class Record:
    """Parts that were measured, in a file. A damaged file counts as none."""

    def __init__(self, path: Path, model: Path) -> None:
        """Read the file, if there is one.

        Args:
            path: Path of the file.
            model: Model that is measured.
        """
        self._path, self._model = path, model
        self._parts = _read(path)

    def get(self, part: str, key: str) -> Kept | None:
        """Return what was measured of a part with the same input; None if nothing was."""
        kept = self._parts.get(part)
        return kept if kept is not None and kept.key == key else None

    def keep(self, part: str, kept: Kept) -> None:
        """Keep a part.

        Raises:
            StoreError: The file cannot be written.
        """
        self._parts[part] = kept
        self._write()

    def _write(self) -> None:
        file = _File(version=1, run=run_record(), model=str(self._model), parts=self._parts)
        write_bytes(self._path, file.model_dump_json(indent=2).encode() + b"\n")


def record_path(config: Path) -> Path:
    """Return the path of the file that belongs to a configuration."""
    return config.with_suffix(".tune.json")


def key_of(*about: object) -> str:
    """Return a name of what a part measures."""
    return hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()


# -- inside --------------------------------------------------------------------------------------


def _read(path: Path) -> dict[str, Kept]:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size > _MOST_BYTES:
                return {}
            return dict(validate_json(_File, file.read()).parts)
    except (OSError, ValidationError):
        return {}
