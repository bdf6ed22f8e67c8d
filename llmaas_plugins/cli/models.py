"""Models that commands open and evaluate."""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmaas_hooks import ConfigError
from llmaas_plugins.cli.output import progress_bar, progress_bar_on_copy
from llmaas_plugins.model.loading import loaded

if TYPE_CHECKING:
    from llmaas_plugins.model.forward import Evaluator

__all__ = [
    "add_model_action",
    "as_loaded",
    "check_file",
    "context_length",
    "evaluator_of",
    "identified",
    "opening",
    "trained_context",
]

_POLL_S = 0.2


def add_model_action(  # noqa: PLR0913  an action consists of these
    actions: Any,
    name: str,
    func: Any,
    text: str,
    description: str,
    *,
    is_prepared: bool = False,
    is_loaded: bool = False,
) -> argparse.ArgumentParser:
    """Register an action on a model, on a prepared model, or on the file that apps load for it."""
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=description)
    metavar, what = ("FILE", "the prepared model") if is_prepared else ("MODEL", "the model")
    parser.add_argument("model", type=Path, metavar=f"{metavar}.gguf", help=what)
    parser.set_defaults(func=_on_loaded(func) if is_loaded else func)
    return parser


def as_loaded(model: Path, config: str | None = None) -> Path:
    """Return the file that apps load in a model's place, and say so; the model itself if none is.

    Args:
        model: Path of the model.
        config: Path of the configuration; None for the one that apps find.

    Raises:
        ConfigError: The configuration cannot be read.
    """
    from llmaas_plugins.config import load_config
    from llmaas_plugins.model.made_files import MadeFiles

    made = MadeFiles(load_config(config).models).llmaas_model_path(str(model.absolute()))
    if made is None:
        return model
    print(f"Apps load {made} in place of {model}, and so does this command.", file=sys.stderr)
    return Path(made)


def _on_loaded(func: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Return a command that works on the file that apps load in its model's place."""

    @functools.wraps(func)
    def run(args: argparse.Namespace) -> int:
        args.model = as_loaded(args.model)
        return func(args)

    return run


def check_file(model: Path) -> None:
    """Check that a model is a file.

    Raises:
        ConfigError: Nothing has this path, or a folder or a device.
    """
    if model.is_dir():
        raise ConfigError(f"{model} is a folder, expected a model in GGUF: name the file in it.")
    if not model.is_file():
        raise ConfigError(f"found no file {model}; expected a model in GGUF.")


def identified(model: Path) -> str:
    """Return a model's digest, with a progress bar while the file is read.

    Raises:
        StoreError: A file cannot be read, or changes while it is read.
    """
    from llmaas_plugins.model.digest import begin_file_digest

    digest = begin_file_digest(model)
    if (found := digest.get(_POLL_S)) is not None:
        return found
    n_bytes = sum(stamp.n_bytes for _, stamp in digest.files if stamp is not None)
    with progress_bar(f"identifying {model.name}", "B", n_bytes) as bar:
        while (found := digest.get(_POLL_S)) is None:
            bar.update(digest.n_read - bar.n)
    return found


@contextlib.contextmanager
def evaluator_of(model: Path, **plugins: object) -> Iterator[tuple[Any, Evaluator]]:
    """Load a model with plugins that observe and change it; yield it with an evaluator.

    Raises:
        ConfigError: llama.cpp cannot load the model.
    """
    from llmaas_plugins.activation import activate
    from llmaas_plugins.model.forward import Evaluator

    with (
        activate({"on_error": "raise"}, plugins),
        opening(model) as opened,
        Evaluator(opened.model) as evaluator,
    ):
        yield opened, evaluator


@contextlib.contextmanager
def opening(model: Path) -> Iterator[Any]:
    """Load a model without a context, with a progress bar, which takes long from a slow disk.

    Raises:
        ConfigError: llama.cpp cannot load the model.
    """
    with contextlib.ExitStack() as stack:
        with progress_bar_on_copy(f"opening {model.name}", "%", 100) as bar:
            opened = stack.enter_context(
                loaded(model, progress=lambda share: bar.update(int(100 * share) - bar.n))
            )
        yield opened


def trained_context(model: Path) -> int | None:
    """Return the longest context that a model was trained with, or None if it is not recorded.

    Raises:
        ConfigError: The file is not a GGUF file.
    """
    from llmaas_plugins.model.gguf_header import read_outline

    return context_length(read_outline(model).fields)


def context_length(fields: Mapping[str, object]) -> int | None:
    """Return the context length that a model was trained with, by its fields; None if unknown."""
    found = fields.get(f"{fields.get('general.architecture')}.context_length")
    return found if isinstance(found, int) and found > 0 else None
