"""``llmaas flash``: preparation of models that are larger than memory."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from llmaas_plugins.cli.flash.check import check
from llmaas_plugins.cli.flash.pack import pack
from llmaas_plugins.cli.flash.plan import add_plan_options, plan
from llmaas_plugins.cli.models import add_model_action

__all__ = ["add_parser"]

_MOST_GROUP_LAYERS = 64


def add_parser(subparsers: Any) -> None:
    """Register the sub-command and its actions."""
    parser = subparsers.add_parser("flash", help="prepare models that are larger than memory")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    pack_ = add_model_action(
        actions,
        "pack",
        pack,
        "write a model's weights in this processor's fastest layout",
        "Write a model's weights to a file beside it, in the layout to which llama.cpp repacks "
        "them on this processor. `flash_weights` then streams them from that file and computes as "
        "fast as llama.cpp with a model in memory. The model file is still needed. If the command "
        "is stopped, run it again to continue.",
    )
    pack_.add_argument(
        "--sparse",
        action="store_true",
        help="also write the weights by columns, for the sparse mode, which reads only some "
        "columns for each token; the packed file is written if the model has none",
    )
    pack_.add_argument(
        "--group-layers",
        type=_group_layers,
        default=1,
        metavar="N",
        help="with --sparse: layers whose columns are stored and read together (default 1)",
    )
    pack_.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="with --sparse: calibration text that shows which columns matter (default: text that "
        "the model writes itself)",
    )
    check_ = add_model_action(
        actions,
        "check",
        check,
        "verify the files that `pack` wrote",
        "Read the files that `llmaas flash pack` wrote for a model, and verify their checksums. "
        "Exit status 1 means that a file is damaged or another model's, or that there is none.",
    )
    check_.add_argument("--json", action="store_true", help="print JSON")
    plan_ = add_model_action(
        actions,
        "plan",
        plan,
        "predict the time for a token within a memory budget, and recommend settings",
        "Measure the disk, and predict the time for a token within a memory budget from that and "
        "the model's sizes: in the exact mode, in the sparse mode, and in ActiveFlow's pipeline.",
    )
    add_plan_options(plan_)


def _group_layers(text: str) -> int:
    number = int(text)
    if not 1 <= number <= _MOST_GROUP_LAYERS:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and {_MOST_GROUP_LAYERS}")
    return number
