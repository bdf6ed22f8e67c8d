"""``llmaas elastic``: models that run at several widths."""

from __future__ import annotations

from typing import Any

from llmaas_plugins.cli.elastic.prepare import (
    add_prepare_options,
    add_restore_options,
    prepare,
    restore,
)
from llmaas_plugins.cli.elastic.profile import add_profile_options, profile
from llmaas_plugins.cli.elastic.score import add_score_options, score
from llmaas_plugins.cli.elastic.show import show
from llmaas_plugins.cli.models import add_model_action

__all__ = ["add_parser"]


def add_parser(subparsers: Any) -> None:
    """Register the sub-command and its actions."""
    parser = subparsers.add_parser("elastic", help="prepare models that run at several widths")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    score_ = add_model_action(
        actions,
        "score",
        score,
        "measure how much each head, neuron and layer of a model matters",
        "Measure how much a model's groups of query heads, neurons and layers matter, and write "
        "these scores to MODEL.scores.npz beside it, or to --output. Scores come from gradients if "
        "torch is installed (`pip install 'llmaas-plugins[train]'`), otherwise from the "
        "fluctuation of values.",
    )
    add_score_options(score_)
    prepare_ = add_model_action(
        actions,
        "prepare",
        prepare,
        "write a model that runs at several widths",
        "Write a copy of a model whose heads and neurons are ordered by importance, with a table "
        "of how many of them each level from 100 % to 20 % uses. In any llama.cpp, the copy "
        "computes the same as the model; `elastic` uses only part of it on request. Give a model "
        "in F32, F16 or BF16 and quantize it with --quantize: in models that are quantized "
        "already, neurons can only move in blocks of 32 or 256. LoRA adapters made for the model "
        "do not fit the written file.",
    )
    add_prepare_options(prepare_)
    restore_ = add_model_action(
        actions,
        "restore",
        restore,
        "write the model from which a prepared file was made",
        "Write the file from which a prepared file was made, byte for byte, and verify its "
        "SHA-256. Files that were quantized while preparing cannot be restored.",
        is_prepared=True,
    )
    add_restore_options(restore_)
    show_ = add_model_action(
        actions,
        "show",
        show,
        "print the levels of a prepared model",
        "Print a prepared model's levels: the share of the blocks' bytes that each level uses "
        "(listing key and value projections separately), and its groups and neurons in each layer.",
        is_prepared=True,
    )
    show_.add_argument("--json", action="store_true", help="print JSON")
    profile_ = add_model_action(
        actions,
        "profile",
        profile,
        "measure the latency of each level on this machine",
        "Measure the time to the first token and the time of each further token at each level of a "
        "prepared model, for several prompt lengths and numbers of threads, and keep the results.",
        is_prepared=True,
    )
    add_profile_options(profile_)
