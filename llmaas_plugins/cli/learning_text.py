"""Text to learn adapters from: files, or what the model writes, kept until the adapters are."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from llmaas_hooks import ConfigError
from llmaas_plugins.cli.files import content_of
from llmaas_plugins.cli.given_text import tokens_of
from llmaas_plugins.cli.models import evaluator_of, identified
from llmaas_plugins.cli.output import progress_bar
from llmaas_plugins.cli.own_text import own_text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llmaas_plugins.model.forward import Evaluator

__all__ = ["add_text_option", "learning_windows", "own_text_path"]


def add_text_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--text``."""
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="text to learn from, best of the kind that the model will see (default: text that the "
        "model writes itself)",
    )


def learning_windows(args: argparse.Namespace, n_tokens: int, folder: Path) -> NDArray[np.int32]:
    """Return windows of ``n_tokens`` tokens of text in all, or of the whole text if it is shorter.

    All have the same length: a last window that is shorter is left out, unless it is the only one.

    Raises:
        ConfigError: A text cannot be read, or has no token.
        StoreError: The model's own text cannot be kept in ``folder``.
    """
    import numpy as np

    with evaluator_of(args.model) as (model, evaluator):
        if args.text:
            text = np.concatenate([tokens_of(content_of(path), model) for path in args.text])
        else:
            text = _own(args, evaluator, n_tokens, own_text_path(folder, n_tokens))
        if not len(text):
            raise ConfigError("the text is empty. Give a longer text with `--text FILE`.")
        windows = list(evaluator.chosen(text, n_tokens))
    if len(windows) > 1 and len(windows[-1]) < len(windows[0]):
        windows.pop()
    return np.stack(windows)


def own_text_path(folder: Path, n_tokens: int) -> Path:
    """Return the path of the text that the model writes itself."""
    return folder / f"text-{n_tokens}.progress"


# -- internals -----------------------------------------------------------------------------------


def _own(
    args: argparse.Namespace, evaluator: Evaluator, n_tokens: int, path: Path
) -> NDArray[np.int32]:
    """Return text that the model writes. Rounds that are in the file already are not repeated."""
    from llmaas_plugins.elastic.checkpoint import Checkpoint, fingerprint_of

    fingerprint = fingerprint_of({"model": identified(args.model), "tokens": n_tokens})
    written = Checkpoint(path, fingerprint)
    try:
        with progress_bar("text", "token", n_tokens) as bar:
            return own_text(evaluator, n_tokens, written, bar.update)
    finally:
        written.save()
