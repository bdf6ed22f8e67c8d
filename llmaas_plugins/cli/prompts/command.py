"""``llmaas prompts``: the tiny language model that shortens prompts."""

from __future__ import annotations

from typing import Any

from llmaas_plugins.cli.prompts.explain import add_explain
from llmaas_plugins.cli.prompts.learn import add_learn

__all__ = ["add_parser"]


def add_parser(subparsers: Any) -> None:
    """Register the sub-command and its actions."""
    parser = subparsers.add_parser("prompts", help="learn which words of prompts to read")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    add_learn(actions)
    add_explain(actions)
