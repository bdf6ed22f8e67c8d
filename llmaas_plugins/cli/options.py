"""Options that several commands have, and the values they take."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

__all__ = ["add_config_option", "at_least", "positive"]

_MOST_DIGITS = 9


def add_config_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--config``."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="llmaas.toml (default: $LLMAAS_CONFIG, or llmaas.toml in this folder, or "
        "~/.config/llmaas/llmaas.toml)",
    )


def at_least(least: int) -> Callable[[str], int]:
    """Return what makes a whole number of an option's text, ``least`` or more."""

    def parsed(text: str) -> int:
        is_number = text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS
        if not is_number or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a number from {least} on, found {text!r}")
        return int(text)

    return parsed


def positive(text: str) -> float:
    """Return the number above 0 that an option's text is."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {text!r}")
    return number
