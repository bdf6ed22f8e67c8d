"""Record of what ``llmaas setup`` has done for a model, so that it is not done again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from llmaas_plugins.files.file_bytes import as_store_error
from llmaas_plugins.files.partial_file import write_bytes
from llmaas_plugins.files.store_lock import folder_lock
from llmaas_plugins.model.digest import file_digest
from llmaas_plugins.validation import validate_json

__all__ = ["DIRECTORY", "Done", "MadeBefore", "Record", "folder_of", "key_of"]

DIRECTORY = Path("~/.cache/llmaas/setup")
_RECORD, _MADE = "record.json", "made.json"

_Content = TypeVar("_Content", bound=BaseModel)


class Done(BaseModel):
    """A step that was done.

    Attributes:
        key: Name of what it did.
        result: Path of its result; None if it has none.
        digest: Digest of the prepared file after it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    result: str | None
    digest: str


class _Steps(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1]
    done: Mapping[str, Done]


class _Made(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1]
    digests: Mapping[str, str]


class Record:
    """Steps that were done for a model, in a file. A damaged file counts as none."""

    def __init__(self, folder: Path) -> None:
        """Read the record in ``folder``, if there is one."""
        self._path = folder / _RECORD
        found = _read(self._path, _Steps)
        self._done = {} if found is None else dict(found.done)

    def get(self, step: str, key: str) -> Done | None:
        """Return what was recorded of a step with the same input; None if nothing was."""
        done = self._done.get(step)
        return done if done is not None and done.key == key else None

    def keep(self, step: str, done: Done) -> None:
        """Record a step.

        Raises:
            StoreError: The record cannot be written.
        """
        self._done[step] = done
        _write(self._path, _Steps(version=1, done=self._done))


class MadeBefore:
    """Prepared files that this command made, by their paths, whatever they were made of."""

    def __init__(self) -> None:
        """Read the list, if there is one."""
        self._path = DIRECTORY.expanduser() / _MADE
        self._digests = self._found()

    def has(self, path: Path) -> bool:
        """Return whether a file is as this command wrote it.

        Files appear only when they are complete, so none that an earlier run left is half-written.
        """
        name = str(path)
        return name in self._digests and self._digests[name] == file_digest(path)

    def keep(self, path: Path) -> None:
        """Note the file that this command has written.

        Raises:
            StoreError: The file cannot be read, or the list cannot be written.
        """
        digest = file_digest(path)  # which may take long
        folder = self._path.parent
        with as_store_error(f"cannot open {folder}"), folder_lock(folder):  # other runs write, too
            self._digests = self._found() | {str(path): digest}
            _write(self._path, _Made(version=1, digests=self._digests))

    def _found(self) -> dict[str, str]:
        found = _read(self._path, _Made)
        return {} if found is None else dict(found.digests)


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


# -- inside --------------------------------------------------------------------------------------


def _read(path: Path, kind: type[_Content]) -> _Content | None:
    try:
        return validate_json(kind, path.read_bytes())
    except (OSError, ValidationError):
        return None


def _write(path: Path, content: BaseModel) -> None:
    write_bytes(path, content.model_dump_json().encode())
