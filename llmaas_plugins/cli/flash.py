"""``llmaas flash``: prepare models that are larger than memory."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from llmaas_plugins.cli.flash_check import check
from llmaas_plugins.cli.flash_pack import pack
from llmaas_plugins.cli.flash_plan import add_plan_options, plan
from llmaas_plugins.cli.offline import add_model_action

__all__ = ["add_parser"]

_MOST_GROUP_LAYERS = 64


def add_parser(subparsers: Any) -> None:
    """Register the sub-command and its own ones."""
    parser = subparsers.add_parser("flash", help="prepare models that are larger than memory")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    pack_ = add_model_action(
        actions,
        "pack",
        pack,
        "write a model's weights as this processor multiplies them fastest",
        "Write a model's weights to a file beside it, in the layout that llama.cpp "
        "repacks them to on this processor. `flash_weights` streams them from there then, and "
        "computes as fast as llama.cpp does with a model in memory. The model file stays needed. "
        "If it is stopped, the same command goes on from there.",
    )
    pack_.add_argument(
        "--sparse",
        action="store_true",
        help="also write them by columns, for the sparse mode, which reads some of them for each "
        "token; the packed file is written if there is none of this model",
    )
    pack_.add_argument(
        "--group-layers",
        type=_group_layers,
        default=1,
        metavar="N",
        help="with --sparse: layers whose columns are side by side, and read at once (default 1)",
    )
    pack_.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="with --sparse: text to see with which columns matter (default: what the model says)",
    )
    check_ = add_model_action(
        actions,
        "check",
        check,
        "verify the files that `pack` wrote",
        "Read the files that `llmaas flash pack` wrote for a model, and compare them with their "
        "checksums. Exit status 1: one is damaged, or another model's.",
    )
    check_.add_argument("--json", action="store_true", help="print JSON")
    plan_ = add_model_action(
        actions,
        "plan",
        plan,
        "predict what a token takes with a memory budget, and recommend settings",
        "Measure the disk, and predict from that and the sizes of the model what a token takes "
        "with a memory budget: in the exact mode, in the sparse one, and in ActiveFlow's pipeline.",
    )
    add_plan_options(plan_)


def _group_layers(text: str) -> int:
    number = int(text)
    if not 1 <= number <= _MOST_GROUP_LAYERS:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and {_MOST_GROUP_LAYERS}")
    return number
