"""What commands share that take minutes: a model to evaluate with, and Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmaas_hooks import ConfigError, LlmaasError

if TYPE_CHECKING:
    from llmaas_plugins.evaluating import Evaluator

__all__ = ["add_model_action", "content_of", "evaluating", "loaded", "stoppable"]


def add_model_action(
    actions: Any, name: str, func: Any, text: str, description: str
) -> argparse.ArgumentParser:
    """Register an action on a model."""
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=description)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf", help="the model")
    parser.set_defaults(func=func)
    return parser


@contextlib.contextmanager
def evaluating(model: Path, **plugins: object) -> Iterator[tuple[Any, Evaluator]]:
    """A model that plugins see and can change, and what evaluates text with it.

    Raises:
        ConfigError: llama.cpp cannot load it.
    """
    from llama_cpp._logger import set_verbose

    from llmaas_plugins.activation import activate
    from llmaas_plugins.evaluating import Evaluator

    set_verbose(False)  # ggml tells of every graph
    with (
        activate({"on_error": "raise"}, plugins),
        loaded(model) as opened,
        Evaluator(opened.model) as evaluator,
    ):
        yield opened, evaluator


@contextlib.contextmanager
def loaded(path: Path) -> Iterator[Any]:
    """A model, for contexts of one's own.

    Raises:
        ConfigError: llama.cpp cannot load it.
    """
    from llama_cpp import _internals, llama_cpp

    params = llama_cpp.llama_model_default_params()
    try:
        model = _internals.LlamaModel(path_model=str(path), params=params, verbose=False)
    except ValueError as error:
        raise ConfigError(f"cannot load model {path}: {error}") from error
    with contextlib.closing(model):
        yield model


def content_of(text: Path) -> bytes:
    """A text's bytes.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        return text.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {text}: {error.strerror}.") from error


@contextlib.contextmanager
def stoppable(then: str) -> Iterator[None]:
    """Ctrl-C is no accident.

    Args:
        then: What is left, or what to do.

    Raises:
        LlmaasError: It was pressed.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        raise LlmaasError(f"stopped; {then}") from error
