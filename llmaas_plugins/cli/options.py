"""Options that several commands have, and parsers of option values."""

from __future__ import annotations

import argparse
import importlib.util
import math
import re
from collections.abc import Callable, Sequence
from typing import NoReturn

from llmaas_hooks import ConfigError
from llmaas_hooks.discovery import suggest

__all__ = [
    "add_config_option",
    "add_renamed_option",
    "at_least",
    "finite",
    "positive",
    "require_torch",
    "unrecognized",
]

_MOST_DIGITS = 9
_LARGEST = 1e9


def add_config_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--config``."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="configuration file (default: $LLMAAS_CONFIG, or llmaas.toml in this folder, or "
        "~/.config/llmaas/llmaas.toml)",
    )


def add_renamed_option(parser: argparse.ArgumentParser, old: str, new: str) -> None:
    """Refuse the option ``old`` with an error that names ``new``; help does not show it."""

    def refuse(_value: str) -> NoReturn:
        raise argparse.ArgumentTypeError(f"this option is now called {new}")

    parser.add_argument(old, type=refuse, help=argparse.SUPPRESS)


def at_least(least: int) -> Callable[[str], int]:
    """Return a parser for option values that are integers of at least ``least``."""

    def parsed(text: str) -> int:
        is_number = text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS
        if not is_number or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected an integer from {least} on, found {text!r}")
        return int(text)

    return parsed


def positive(text: str) -> float:
    """Parse an option value that is a number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number <= _LARGEST:
        raise argparse.ArgumentTypeError(
            f"expected a number above 0, up to {_LARGEST:g}, found {text!r}"
        )
    return number


def finite(text: str) -> float:
    """Parse an option value that is a number of any sign."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not abs(number) <= _LARGEST:
        raise argparse.ArgumentTypeError(
            f"expected a number from {-_LARGEST:g} to {_LARGEST:g}, found {text!r}"
        )
    return number


def require_torch(what: str) -> None:
    """Check that torch is installed, without importing it.

    Raises:
        ConfigError: ``what`` needs torch, which is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            f"{what} needs torch, which is not installed: pip install 'llmaas-plugins[train]'."
        )


def unrecognized(arguments: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """Return the error for arguments that a parser does not know, with the nearest option."""
    known = re.findall(r"--[\w-]+", parser.format_usage())
    typed = [word.partition("=")[0] for word in arguments if word.startswith("--")]
    near = next(filter(None, (suggest(word, known) for word in typed)), "")
    return f"unrecognized arguments: {' '.join(arguments)}{near and '.' + near}"
