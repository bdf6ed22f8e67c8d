"""Helpers of long-running commands: models to evaluate, and files to write."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmaas_hooks import ConfigError
from llmaas_plugins.files.file_bytes import as_store_error
from llmaas_plugins.model.loading import loaded

if TYPE_CHECKING:
    from llmaas_plugins.model.forward import Evaluator

__all__ = [
    "add_model_action",
    "check_target",
    "content_of",
    "evaluating",
    "folder_beside",
    "trained_context",
]


def add_model_action(  # noqa: PLR0913  an action consists of these
    actions: Any, name: str, func: Any, text: str, description: str, *, is_prepared: bool = False
) -> argparse.ArgumentParser:
    """Register an action on a model, or on a prepared model."""
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=description)
    metavar, what = ("FILE", "the prepared model") if is_prepared else ("MODEL", "the model")
    parser.add_argument("model", type=Path, metavar=f"{metavar}.gguf", help=what)
    parser.set_defaults(func=func)
    return parser


@contextlib.contextmanager
def evaluating(model: Path, **plugins: object) -> Iterator[tuple[Any, Evaluator]]:
    """Load a model with plugins that observe and change it; yield it with an evaluator.

    Raises:
        ConfigError: llama.cpp cannot load the model.
    """
    from llmaas_plugins.activation import activate
    from llmaas_plugins.model.forward import Evaluator

    with (
        activate({"on_error": "raise"}, plugins),
        loaded(model) as opened,
        Evaluator(opened.model) as evaluator,
    ):
        yield opened, evaluator


def trained_context(model: Path) -> int | None:
    """Return the longest context that a model was trained with, or None if it is not recorded.

    Raises:
        ConfigError: The file is not a GGUF file.
    """
    from llmaas_plugins.model.gguf_header import read_header

    fields = read_header(model).fields
    found = fields.get(f"{fields.get('general.architecture')}.context_length")
    return found if isinstance(found, int) and found > 0 else None


def content_of(text: Path) -> bytes:
    """Return a text file's bytes.

    Raises:
        ConfigError: The file cannot be read.
    """
    try:
        return text.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {text}: {error.strerror}.") from error


def check_target(path: Path, option: str) -> None:
    """Check that a file can be written, before anything takes minutes.

    Args:
        path: Path of the file.
        option: Option with which the user can choose another path.

    Raises:
        ConfigError: The path is a folder or a device, or its folder does not exist.
        StoreError: The file cannot be written.
    """
    then = f" Choose another place with `{option} FILE`."
    with as_store_error(f"cannot write {path}", then):
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is a folder or a device, expected a file's name.{then}")
        if not path.parent.is_dir():
            raise ConfigError(f"found no folder {path.parent} to write {path.name} to.{then}")
        with folder_beside(path, then):
            pass


@contextlib.contextmanager
def folder_beside(path: Path, then: str = "") -> Iterator[Path]:
    """Make a temporary folder beside a file that is to be written; remove it at the end.

    Args:
        path: Path of the file.
        then: Advice for the error message.

    Raises:
        StoreError: The folder cannot be made.
    """
    with as_store_error(f"cannot write beside {path}", then):
        folder = tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent)
    with folder as name:
        yield Path(name)
