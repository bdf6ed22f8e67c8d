"""Shorter prompts whose answers ``llmaas deadlines learn --shares`` compares, too."""

from __future__ import annotations

import argparse
import contextlib
from typing import TYPE_CHECKING, Any, get_args

from llmaas_hooks import ConfigError, LlmaasError
from llmaas_plugins.cli.output import progress_bar
from llmaas_plugins.cli.short_prompts_table import configured

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from llmaas_hooks import Tokens

__all__ = ["add_share_options", "check_shares", "scored", "shortened_prompts", "shortener"]

_N_CTX = 16
"""Cells of the engine that scorers ask; they make contexts of their own for prompts."""


def add_share_options(add: Any) -> None:
    """Add ``--shares`` and ``--scorer`` with a parser's ``add_argument``."""
    from llmaas_plugins.short_prompts.config import ScorerName

    add(
        "--shares",
        type=_shares,
        default=(),
        metavar="SHARE,…",
        help="shares of each prompt to read besides all of it, such as 0.7,0.5,0.3 (default: none)",
    )
    add(
        "--scorer",
        choices=get_args(ScorerName),
        help="how short_prompts judges the words of the shares (default: as configured)",
    )


def check_shares(args: argparse.Namespace) -> None:
    """Refuse too many shares, and a scorer without shares.

    Raises:
        ConfigError: The options make no sense.
    """
    from llmaas_plugins.deadlines.answers import MOST_SHARES

    if len(args.shares) > MOST_SHARES:
        raise ConfigError(f"--shares has {len(args.shares)}, expected at most {MOST_SHARES}.")
    if args.scorer is not None and not args.shares:
        raise ConfigError("--scorer needs --shares: 0.7,0.5,0.3 are those that requests may use.")


def shortener(args: argparse.Namespace) -> Mapping[str, Mapping[str, Any]]:
    """Return the table of ``short_prompts`` to activate: as configured, with the given scorer.

    It is empty if no shares are given.
    """
    return {"short_prompts": configured(args.scorer)} if args.shares else {}


@contextlib.contextmanager
def scored(path: Path) -> Iterator[Any]:
    """Load a model once for everything: as a ``Llama``, whose prompts scorers can judge.

    Raises:
        ConfigError: llama.cpp cannot load the model.
    """
    from llama_cpp import Llama

    from llmaas_plugins.model.loading import load_errors

    with load_errors(path):
        llama = Llama(str(path), n_ctx=_N_CTX, verbose=False)
    with contextlib.closing(llama):
        yield llama


def shortened_prompts(
    shares: Sequence[float], plugin: Any, llama: Any, prompts: Sequence[Tokens]
) -> tuple[str, list[list[Tokens]]]:
    """Return the scorer's identity, and what is read of each prompt, for each of the shares.

    A prompt stays whole if no word may be left out, or if requests would not shorten it.

    Args:
        shares: Shares of a prompt to read.
        plugin: The plugin ``short_prompts``, which is active.
        llama: The ``llama_cpp.Llama`` whose prompts they are.
        prompts: Tokens of each prompt.

    Raises:
        LlmaasError: Another encoder was trained or found meanwhile, or the words cannot be scored.
    """
    found: list[list[Tokens]] = [[] for _ in shares]
    name, scorer = plugin.scorer_name(llama), plugin.scorer_identity(llama)
    with progress_bar(f"choosing words ({name})", "prompt", len(prompts)) as bar:
        for tokens in prompts:
            read = [tokens] * len(shares)
            if len(tokens) >= plugin.least_tokens:
                read = [one.tokens for one in plugin.shortened(llama, tokens, shares)]
            for parts, one in zip(found, read, strict=True):
                parts.append(one)
            bar.update()
    if (now := plugin.scorer_identity(llama)) != scorer:
        raise LlmaasError(
            f"the words were chosen by {scorer!r} first, and by {now!r} at the end: another "
            "encoder was trained or found meanwhile. Run the command again."
        )
    return scorer, found


# -- internals -----------------------------------------------------------------------------------


def _shares(text: str) -> tuple[float, ...]:
    """Parse shares; the longest becomes the first."""
    try:
        found = sorted({float(part) for part in text.split(",")}, reverse=True)
    except ValueError:
        found = []
    if not found or not 0 < found[-1] <= found[0] < 1:
        raise argparse.ArgumentTypeError(
            f"expected shares above 0 and below 1, such as 0.7,0.5, found {text!r}"
        )
    return tuple(found)
