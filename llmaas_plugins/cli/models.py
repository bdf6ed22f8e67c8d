"""Models that commands open and evaluate."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmaas_plugins.cli.output import progress_bar, progress_bar_on_copy
from llmaas_plugins.model.loading import loaded

if TYPE_CHECKING:
    from llmaas_plugins.model.forward import Evaluator

__all__ = ["add_model_action", "evaluator_of", "identified", "opening", "trained_context"]

_POLL_S = 0.2


def add_model_action(  # noqa: PLR0913  an action consists of these
    actions: Any, name: str, func: Any, text: str, description: str, *, is_prepared: bool = False
) -> argparse.ArgumentParser:
    """Register an action on a model, or on a prepared model."""
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=description)
    metavar, what = ("FILE", "the prepared model") if is_prepared else ("MODEL", "the model")
    parser.add_argument("model", type=Path, metavar=f"{metavar}.gguf", help=what)
    parser.set_defaults(func=func)
    return parser


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
    from llmaas_plugins.model.gguf_header import read_header

    fields = read_header(model).fields
    found = fields.get(f"{fields.get('general.architecture')}.context_length")
    return found if isinstance(found, int) and found > 0 else None
