"""Record of what ``llmaas setup`` has done for a model, so that it is not done again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from llmaas_plugins.files.partial_file import write_bytes

__all__ = ["DIRECTORY", "Record", "folder_of", "key_of"]

DIRECTORY = Path("~/.cache/llmaas/setup")
_NAME = "record.json"


class _Done(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    result: str | None


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1]
    own: list[str]
    done: dict[str, _Done]


class Record:
    """Steps that were done, and files that belong to this command, kept in a file.

    A damaged record counts as none: steps are then done again.
    """

    def __init__(self, folder: Path) -> None:
        """Read the record in ``folder``, if there is one."""
        self._path = folder / _NAME
        try:
            found = _File.model_validate_json(self._path.read_bytes())
        except (OSError, ValidationError):
            found = _File(version=1, own=[], done={})
        self._own, self._done = list(found.own), dict(found.done)

    def has(self, step: str, key: str) -> bool:
        """Return whether a step was done with the same input, and its result is still there."""
        done = self._done.get(step)
        if done is None or done.key != key:
            return False
        return done.result is None or Path(done.result).exists()

    def keep(self, step: str, key: str, result: str | None) -> None:
        """Record a step.

        Raises:
            StoreError: The record cannot be written.
        """
        self._done[step] = _Done(key=key, result=result)
        self._write()

    def owns(self, path: Path) -> bool:
        """Return whether a file is this command's, which it may overwrite."""
        return str(path) in self._own

    def own(self, path: Path) -> None:
        """Record that a file will be this command's, before it is written.

        Raises:
            StoreError: The record cannot be written.
        """
        if not self.owns(path):
            self._own.append(str(path))
            self._write()

    def _write(self) -> None:
        content = _File(version=1, own=self._own, done=self._done)
        write_bytes(self._path, content.model_dump_json().encode())


def folder_of(digest: str) -> Path:
    """Return the folder that keeps the record of a model."""
    return DIRECTORY.expanduser() / digest[:32]


def key_of(arguments: Sequence[str], digests: Sequence[str]) -> str:
    """Return a name of what a step does.

    Args:
        arguments: Arguments of its command.
        digests: Digests of the files that it reads.
    """
    return hashlib.sha256(json.dumps([*arguments, *digests]).encode()).hexdigest()
