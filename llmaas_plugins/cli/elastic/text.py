"""Calibration text of ``llmaas elastic score`` and ``prepare``."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from llmaas_hooks import ConfigError, Tokens
from llmaas_plugins.cli.files import content_of
from llmaas_plugins.cli.given_text import packaged_tokens, tokens_of
from llmaas_plugins.cli.options import require_torch
from llmaas_plugins.cli.own_text import own_text
from llmaas_plugins.model.loading import loaded

if TYPE_CHECKING:
    from llmaas_plugins.elastic.checkpoint import Checkpoint
    from llmaas_plugins.model.forward import Evaluator

__all__ = [
    "N_TOKENS",
    "Text",
    "add_calibration_options",
    "calibration_text",
    "check_calibration",
    "n_written_tokens",
    "text_digest",
]

N_TOKENS = 8192
"""Default number of calibration tokens."""
_LEAST_TOKENS, _LEAST_TEXT = 32, 16
"""Fewest tokens to ask for, and fewest to accept: text from the model may end early."""


class Text(NamedTuple):
    """Calibration text.

    Attributes:
        own: Tokens that the model wrote; none if a text was given.
        others: Tokens of the text that was given, or of the packaged texts, by name.
    """

    own: Tokens
    others: Mapping[str, Tokens]

    @property
    def tokens(self) -> Tokens:
        """All tokens, one text after the other."""
        return np.concatenate([self.own, *self.others.values()])


def add_calibration_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for calibration text."""
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="text for calibration (default: text that the model writes itself, and packaged text "
        "of several kinds)",
    )
    parser.add_argument(
        "--tokens",
        type=_n_tokens,
        metavar="N",
        help=f"tokens of this text to use, {_LEAST_TOKENS} or more (default {N_TOKENS}); half of "
        "them are of the model's own text unless the packaged texts are shorter",
    )
    parser.add_argument(
        "--gradients",
        action="store_true",
        help="score units by gradients of the loss, as the paper does, with torch (`pip install "
        "'llmaas-plugins[train]'`); this takes several times as long (default: by the fluctuation "
        "of their values)",
    )


def check_calibration(args: argparse.Namespace) -> None:
    """Check that a text is long enough, and that gradients can be computed.

    Raises:
        ConfigError: The text is too short or cannot be read, or torch is missing.
    """
    if args.text is not None:
        with loaded(args.model, is_vocab_only=True) as model:
            _given(args.text, model)
    if args.gradients:
        require_torch("--gradients")


def text_digest(args: argparse.Namespace) -> str:
    """Return a hash of the text that a command calibrates with, except what the model writes.

    Raises:
        ConfigError: The text cannot be read.
    """
    from llmaas_plugins.elastic.calibration import packaged_texts

    texts = packaged_texts().values() if args.text is None else ()
    content = "\0".join(texts).encode() if args.text is None else content_of(args.text)
    return hashlib.sha256(content).hexdigest()


def n_written_tokens(args: argparse.Namespace) -> int:
    """Return how many tokens the model writes, at most."""
    return 0 if args.text is not None else -(-(args.tokens or N_TOKENS) // 2)


def calibration_text(
    args: argparse.Namespace,
    model: Any,
    evaluator: Evaluator,
    checkpoint: Checkpoint,
    progress: Callable[[int], None],
) -> Text:
    """Return the text that was given; by default, what the model writes and the packaged texts.

    Raises:
        ConfigError: The text cannot be read, or is too short.
    """
    n_tokens = args.tokens or N_TOKENS
    if args.text is not None:
        given = _given(args.text, model)
        return Text(np.empty(0, np.int32), {args.text.name: given})
    own = own_text(evaluator, n_written_tokens(args), checkpoint, progress)
    text = Text(own, packaged_tokens(model, n_tokens - len(own)))
    _check_length(text.tokens, "the calibration text has", "Give it a text with `--text FILE`.")
    return text


# -- internals -----------------------------------------------------------------------------------


def _given(path: Path, model: Any) -> Tokens:
    """Return the tokens of a text that was given."""
    return _check_length(tokens_of(content_of(path), model), f"{path} has", "Give a longer text.")


def _check_length(text: Tokens, whose: str, then: str) -> Tokens:
    if len(text) < _LEAST_TEXT:
        raise ConfigError(
            f"{whose} {len(text)} tokens, expected at least {_LEAST_TEXT} to compute scores. {then}"
        )
    return text


def _n_tokens(text: str) -> int:
    if not text.isdecimal() or len(text) > 9 or int(text) < _LEAST_TOKENS:
        raise argparse.ArgumentTypeError(f"expected {_LEAST_TOKENS} or more, found {text!r}")
    return int(text)
