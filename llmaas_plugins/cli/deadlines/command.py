"""``llmaas deadlines``: answers of elastic models under promises of latency."""

from __future__ import annotations

from typing import Any

from llmaas_plugins.cli.deadlines.learn import add_learn

__all__ = ["add_parser"]


def add_parser(subparsers: Any) -> None:
    """Register the sub-command and its actions."""
    parser = subparsers.add_parser("deadlines", help="learn what narrow levels are worth")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    add_learn(actions)
