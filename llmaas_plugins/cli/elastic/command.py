"""``llmaas elastic``: models that run at several widths."""

from __future__ import annotations

from typing import Any

from llmaas_plugins.cli.elastic.prepare import add_prepare, add_restore
from llmaas_plugins.cli.elastic.profile import add_profile
from llmaas_plugins.cli.elastic.recover import add_recover
from llmaas_plugins.cli.elastic.score import add_score
from llmaas_plugins.cli.elastic.show import add_show

__all__ = ["add_parser"]


def add_parser(subparsers: Any) -> None:
    """Register the sub-command and its actions."""
    parser = subparsers.add_parser("elastic", help="prepare models that run at several widths")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    for add in (add_score, add_prepare, add_recover, add_restore, add_show, add_profile):
        add(actions)
