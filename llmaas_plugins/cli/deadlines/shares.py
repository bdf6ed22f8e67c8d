"""Shorter prompts whose answers ``llmaas deadlines learn --shares`` compares, too."""

from __future__ import annotations

import argparse
import contextlib
from typing import TYPE_CHECKING, Any

from llmaas_hooks import ConfigError, NativeContext, hookimpl
from llmaas_hooks.discovery import suggest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmaas_hooks import Tokens

__all__ = ["Contexts", "add_share_options", "check_shares", "parts_of", "shortened_prompts"]

_N_CTX = 256
"""Cells of the engine that scorers ask; they make contexts of their own for longer prompts."""


class Contexts:
    """Listener that knows the engine's contexts by address, as scorers need them."""

    def __init__(self) -> None:
        """Start without any."""
        self.by_address: dict[int, NativeContext] = {}

    @hookimpl
    def llmaas_native_context(self, context: NativeContext) -> None:
        """Note a context."""
        self.by_address[context.ctx] = context

    @hookimpl
    def llmaas_context_free(self, ctx: int) -> None:
        """Forget a context."""
        self.by_address.pop(ctx, None)


def add_share_options(add: Any) -> None:
    """Add ``--shares`` and ``--scorer`` with a parser's ``add_argument``."""
    add(
        "--shares",
        type=_shares,
        default=(),
        metavar="SHARE,…",
        help="shares of each prompt to read besides all of it, such as 0.7,0.5,0.3 (default: none)",
    )
    add(
        "--scorer",
        metavar="NAME",
        help="scorer of short_prompts that chooses the words of the shares",
    )


def check_shares(args: argparse.Namespace) -> None:
    """Refuse shares without a scorer, and the other way round.

    Raises:
        ConfigError: One of the two options is missing, or there is no such scorer.
    """
    if bool(args.shares) != (args.scorer is not None):
        missing, given = ("--scorer NAME", "--shares") if args.shares else ("--shares", "--scorer")
        raise ConfigError(f"{given} needs {missing}.")
    if not args.shares:
        return
    from llmaas_plugins.deadlines.answers import MOST_SHARES
    from llmaas_plugins.short_prompts.scorers import SCORERS

    if len(args.shares) > MOST_SHARES:
        raise ConfigError(f"--shares has {len(args.shares)}, expected at most {MOST_SHARES}.")
    if args.scorer not in SCORERS:
        raise ConfigError(
            f"--scorer is {args.scorer!r}, expected one of {', '.join(SCORERS)}."
            f"{suggest(args.scorer, SCORERS)}"
        )


def parts_of(
    args: argparse.Namespace, contexts: Contexts, prompts: Sequence[Tokens]
) -> list[list[Tokens]]:
    """Return what is read of each prompt, for each of the shares that were given."""
    if not args.shares:
        return []
    from llama_cpp import Llama

    from llmaas_plugins.short_prompts.scorers import SCORERS

    scorer = SCORERS[args.scorer](contexts.by_address)
    with contextlib.closing(Llama(str(args.model), n_ctx=_N_CTX, verbose=False)) as llama:
        return shortened_prompts(llama, prompts, args.shares, scorer)


def shortened_prompts(
    llama: Any, prompts: Sequence[Tokens], shares: Sequence[float], scorer: Any
) -> list[list[Tokens]]:
    """Return what is read of each prompt, for each share.

    A prompt of which no word may be left out stays whole.

    Args:
        llama: The ``llama_cpp.Llama`` that a scorer asks.
        prompts: Tokens of each prompt.
        shares: Shares of a prompt's tokens.
        scorer: Scorer of ``short_prompts``.
    """
    from llama_cpp import llama_cpp

    from llmaas_plugins.short_prompts.budget import budget, shorten
    from llmaas_plugins.short_prompts.protection import prompt_of
    from llmaas_plugins.short_prompts.vocabulary import Vocabulary

    vocabulary = Vocabulary(llama_cpp.llama_model_get_vocab(llama.model))
    found: list[list[Tokens]] = [[] for _ in shares]
    for tokens in prompts:
        prompt = prompt_of(tokens, vocabulary)
        scores = scorer.scores(prompt, llama)
        for parts, share in zip(found, shares, strict=True):
            parts.append(shorten(prompt, scores, budget(prompt, share)).tokens)
    return found


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
