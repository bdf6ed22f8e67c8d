"""``llmaas elastic``: one model in many widths."""

from __future__ import annotations

from typing import Any

from llmaas_plugins.cli.elastic_prepare import (
    add_prepare_options,
    add_restore_options,
    prepare,
    restore,
)
from llmaas_plugins.cli.elastic_profile import add_profile_options, profile
from llmaas_plugins.cli.elastic_score import add_score_options, score
from llmaas_plugins.cli.elastic_show import show
from llmaas_plugins.cli.offline import add_model_action

__all__ = ["add_parser"]


def add_parser(subparsers: Any) -> None:
    """Register the sub-command and its own ones."""
    parser = subparsers.add_parser("elastic", help="prepare models that run at several widths")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    score_ = add_model_action(
        actions,
        "score",
        score,
        "find which heads, neurons and layers of a model matter",
        "Find how much a model's groups of query heads, neurons and layers matter, and write that "
        "to MODEL.scores.npz beside it, or elsewhere: by gradients if torch is there (`pip install "
        "'llmaas-plugins[train]'`), otherwise by how much their values fluctuate.",
    )
    add_score_options(score_)
    prepare_ = add_model_action(
        actions,
        "prepare",
        prepare,
        "write a model that runs at several widths",
        "Write a model with the heads and neurons of each layer in the order in which they matter, "
        "and with how many of them each level from 100 % to 20 % has. It computes what the model "
        "computes, in any llama.cpp, and `elastic` uses less of it when asked. Prepare F32, F16 or "
        "BF16, and have it quantised with --quantise: in models that are quantised already, "
        "neurons can only move in blocks of 32 or 256. LoRA adapters fit the model, not the file.",
    )
    add_prepare_options(prepare_)
    restore_ = add_model_action(
        actions,
        "restore",
        restore,
        "write the model that a prepared one was made from",
        "Write the file that a prepared one was made from, byte for byte, and verify its SHA-256. "
        "What was quantised on the way cannot be restored.",
        is_prepared=True,
    )
    add_restore_options(restore_)
    show_ = add_model_action(
        actions,
        "show",
        show,
        "print the levels of a prepared model",
        "Print a prepared model's levels: the share of the blocks' bytes that each uses, keys' and "
        "values' projections apart, and how many groups and neurons of each layer.",
        is_prepared=True,
    )
    show_.add_argument("--json", action="store_true", help="print JSON")
    profile_ = add_model_action(
        actions,
        "profile",
        profile,
        "measure what each level costs on this machine",
        "Measure how long the first token and the others take at each level of a prepared model, "
        "by length of the prompt and number of threads, and keep that.",
        is_prepared=True,
    )
    add_profile_options(profile_)
