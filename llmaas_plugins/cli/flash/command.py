"""``llmaas flash``: preparation of models that are larger than memory."""

from __future__ import annotations

from typing import Any

from llmaas_plugins.cli.flash.check import add_check
from llmaas_plugins.cli.flash.distill import add_distill
from llmaas_plugins.cli.flash.pack import add_pack
from llmaas_plugins.cli.flash.plan import add_plan

__all__ = ["add_parser"]


def add_parser(subparsers: Any) -> None:
    """Register the sub-command and its actions."""
    parser = subparsers.add_parser("flash", help="prepare models that are larger than memory")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    for add in (add_pack, add_check, add_plan, add_distill):
        add(actions)
