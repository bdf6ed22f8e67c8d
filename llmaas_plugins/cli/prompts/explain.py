"""``llmaas prompts explain``: what a request would read of a prompt."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from llmaas_hooks import ConfigError
from llmaas_plugins.cli.files import content_of
from llmaas_plugins.cli.models import add_model_action
from llmaas_plugins.cli.options import finite
from llmaas_plugins.cli.output import counted, one_line, print_report
from llmaas_plugins.cli.short_prompts_table import configured

if TYPE_CHECKING:
    from llmaas_plugins.short_prompts.budget import Shortened

__all__ = ["add_explain"]

_MOST_BYTES = 1 << 20
_MARKS = "[-", "-]"
"""Marks around what is left out, as of ``wdiff``."""


def add_explain(actions: Any) -> None:
    """Register ``explain``."""
    from llmaas_plugins.short_prompts.config import ScorerName

    parser = add_model_action(
        actions,
        "explain",
        explain,
        "show what a request would read of a prompt",
        "Print a prompt with the words that would be left out between [- and -].",
        is_loaded=True,
    )
    add = parser.add_argument
    add(
        "--text",
        type=Path,
        metavar="FILE",
        help="file with the prompt, as the model gets it (default: standard input)",
    )
    add(
        "--share",
        type=finite,
        default=0.5,
        help="share of the tokens to read (default %(default)s)",
    )
    add("--scorer", choices=get_args(ScorerName), help="how words are judged (default: the best)")
    add("--json", action="store_true", help="print JSON")


def explain(args: argparse.Namespace) -> int:
    """Shorten a prompt, and print what is left out of it."""
    from llama_cpp import Llama

    from llmaas_plugins.activation import activate
    from llmaas_plugins.elastic.metadata import read_elastic
    from llmaas_plugins.model.loading import load_errors

    if not 0 < args.share <= 1:
        raise ConfigError(f"--share is {args.share}, expected a number above 0, at most 1.0.")
    text = _text(args.text)
    plugins = {"short_prompts": {**configured(args.scorer), "share": args.share}}
    if read_elastic(args.model) is not None:
        plugins["elastic"] = {}
    with activate({"on_error": "raise", "plugins": plugins}) as suite:
        with load_errors(args.model):
            llama = Llama(str(args.model), n_ctx=16, verbose=False)
        try:
            plugin = suite.plugin("short_prompts")
            began = time.perf_counter()
            (found,) = plugin.shortened(llama, _tokens(llama, text), [args.share])
            seconds, scorer = time.perf_counter() - began, plugin.scorer_name(llama)
        finally:
            llama.close()
    print_report(args, _report(found, scorer, seconds), _lines(found, scorer))
    return 0


# -- internals -----------------------------------------------------------------------------------


def _text(path: Path | None) -> bytes:
    """Return the prompt.

    Raises:
        ConfigError: It is empty or too long.
    """
    if path is None and sys.stdin.isatty():
        print("type the prompt, then Ctrl-D; `--text FILE` reads a file", file=sys.stderr)
    text = sys.stdin.buffer.read(_MOST_BYTES + 1) if path is None else content_of(path)
    if not 0 < len(text) <= _MOST_BYTES:
        raise ConfigError(f"expected a prompt of 1 to {_MOST_BYTES} bytes, found {len(text)}.")
    return text


def _tokens(llama: Any, text: bytes) -> Any:
    import numpy as np

    return np.array(llama.tokenize(text, add_bos=True, special=True), np.int32)


def _report(found: Shortened, scorer: str, seconds: float) -> dict[str, Any]:
    return {
        "scorer": scorer,
        "tokens": len(found.prompt.tokens),
        "tokens_read": len(found.tokens),
        "over_budget": found.exceeds,
        "ms": round(1000 * seconds, 3),
        "words": list(found.prompt.words),
        "kept": found.is_kept.tolist(),
        "protected": found.prompt.is_protected.tolist(),
    }


def _lines(found: Shortened, scorer: str) -> Iterator[str]:
    yield from map(one_line, "".join(_marked(found)).splitlines())
    yield ""
    yield (
        f"{len(found.tokens)} of {counted(len(found.prompt.tokens), 'token')} are read (scorer "
        f"{scorer}); {counted(int(found.prompt.is_protected.sum()), 'word')} must stay."
    )
    if found.exceeds:
        yield "The words that must stay are more than this share, so all others are left out."


def _marked(found: Shortened) -> Iterator[str]:
    """Yield the words of a prompt, with marks around those that are left out."""
    was_kept = True
    for word, is_kept in zip(found.prompt.words, found.is_kept.tolist(), strict=True):
        blanks = word[: len(word) - len(word.lstrip())]
        if was_kept and not is_kept:
            yield f"{blanks}{_MARKS[0]}{word.lstrip()}"
        elif is_kept and not was_kept:
            yield f"{_MARKS[1]}{word}"
        else:
            yield word
        was_kept = is_kept
    if not was_kept:
        yield _MARKS[1]
