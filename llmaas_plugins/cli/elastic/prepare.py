"""``llmaas elastic prepare`` and ``restore``: models with levels, and their sources."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmaas_plugins.cli.elastic.preparing import Preparation
from llmaas_plugins.cli.elastic.score import CONTINUE
from llmaas_plugins.cli.elastic.text import add_calibration_options
from llmaas_plugins.cli.files import check_target
from llmaas_plugins.cli.interrupts import stoppable
from llmaas_plugins.cli.models import add_model_action
from llmaas_plugins.cli.options import add_renamed_option
from llmaas_plugins.cli.output import print_report, progress_bar
from llmaas_plugins.files.file_bytes import as_store_error

__all__ = ["add_prepare", "add_restore"]

_TYPES = ("F16", "Q8_0", "Q4_0", "Q4_K", "Q6_K")


def add_prepare(actions: Any) -> None:
    """Register ``prepare``."""
    parser = add_model_action(
        actions,
        "prepare",
        prepare,
        "write a model that runs at several widths",
        "Write a copy of a model whose heads and neurons are ordered by importance, with a table "
        "of how many of them each level from 100 % to 20 % uses. In any llama.cpp, the copy "
        "computes the same as the model; `elastic` uses only part of it on request. Give a model "
        "in Q8_0, or in F32, F16 or BF16 and quantize it with --quantize: neurons of other "
        "quantized models can only move in blocks of 32 or 256. LoRA adapters made for the model "
        "do not fit the written file. The file can be used before widths are searched: it has "
        "the paper's uniform widths first. A run that was stopped goes on where it stopped when "
        "the same command is run again.",
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="output (default: MODEL.elastic.gguf)"
    )
    parser.add_argument(
        "--scores",
        type=Path,
        metavar="FILE",
        help="scores; they are computed and written if the file is missing (default: "
        "MODEL.scores.npz)",
    )
    parser.add_argument(
        "--quantize",
        choices=_TYPES,
        type=str.upper,
        metavar="TYPE",
        help="quantize the model, which must be F32, F16 or BF16, after reordering it: "
        f"{', '.join(_TYPES)}",
    )
    add_renamed_option(parser, "--quantise", "--quantize")
    parser.add_argument(
        "--keep-blocks",
        action="store_true",
        help="move neurons of a Q8_0 model in blocks of 32, as those of other quantized models: "
        "levels are less accurate, but the file computes exactly what the model computes, and "
        "`restore` writes the model again (default: ffn_down is quantized to Q8_0 again)",
    )
    _add_level_options(parser)
    add_calibration_options(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the steps, with estimates of time, memory and disk space, and stop",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def add_restore(actions: Any) -> None:
    """Register ``restore``."""
    parser = add_model_action(
        actions,
        "restore",
        restore,
        "write the model from which a prepared file was made",
        "Write the file from which a prepared file was made, byte for byte, and verify its "
        "SHA-256. Files that were quantized while preparing cannot be restored.",
        is_prepared=True,
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="MODEL.gguf", required=True, help="file to write"
    )


def prepare(args: argparse.Namespace) -> int:
    """Write the prepared file of a model."""
    with stoppable(CONTINUE):
        preparation = Preparation(args)
        if args.dry_run and args.json:  # the report has all that would be announced
            print_report(args, preparation.estimates(), ())
            return 0
        preparation.announce()
        if args.dry_run:
            return 0
        elastic = preparation.run()
    print_report(args, *preparation.result(elastic))
    return 0


def restore(args: argparse.Namespace) -> int:
    """Write the file from which a prepared file was made."""
    from llmaas_plugins.elastic.prepared_file import restore

    check_target(args.output, "-o")
    with stoppable("nothing was written"):
        _write("restoring", args.model, restore(args.model, args.output))
    print(f"{args.output}: {args.output.stat().st_size / 1e6:,.0f} MB, identical to the source.")
    return 0


# -- internals -----------------------------------------------------------------------------------


def _add_level_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cut-keys-values",
        action="store_true",
        help="leave out keys and values with their groups, as the paper does: a level is a share "
        "of all bytes of the blocks. Contexts still serve every level, but a wider level reads "
        "zeros for the groups that a narrower one left out (default: keys and values are whole)",
    )
    parser.add_argument(
        "--no-search",
        dest="is_searched",
        action="store_false",
        help="write only the table `uniform`: searching each layer's widths evaluates some "
        "hundred candidates",
    )
    parser.add_argument(
        "--compensate",
        action="store_true",
        help="also fit biases that restore the mean of what a level leaves out; they are kept for "
        "levels whose predictions they improve",
    )


def _write(what: str, source: Path, writing: Iterator[int]) -> None:
    with as_store_error(f"cannot read {source}"):
        n_bytes = source.stat().st_size
    with progress_bar(what, "B", n_bytes) as bar:
        for n_done in writing:
            bar.update(n_done)
