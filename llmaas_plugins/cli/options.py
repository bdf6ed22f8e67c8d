"""Options that several commands have."""

from __future__ import annotations

import argparse

__all__ = ["add_config_option"]


def add_config_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--config``."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="llmaas.toml (default: $LLMAAS_CONFIG, or llmaas.toml in this folder, or "
        "~/.config/llmaas/llmaas.toml)",
    )
