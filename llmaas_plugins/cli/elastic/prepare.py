"""``llmaas elastic prepare`` and ``restore``: models with levels, and their sources."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmaas_hooks import ConfigError, StoreError
from llmaas_plugins.cli.elastic.score import (
    add_calibration_options,
    check_text,
    keep,
    scored,
    source_blocks,
)
from llmaas_plugins.cli.elastic.search import tried
from llmaas_plugins.cli.files import check_target, folder_beside
from llmaas_plugins.cli.interrupts import stoppable
from llmaas_plugins.cli.models import add_model_action
from llmaas_plugins.cli.options import add_renamed_option
from llmaas_plugins.cli.output import progress_bar
from llmaas_plugins.files.file_bytes import as_store_error

if TYPE_CHECKING:
    from llmaas_plugins.elastic.metadata import Elastic
    from llmaas_plugins.elastic.reordering import Order
    from llmaas_plugins.elastic.units import Blocks, Scores

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
        "do not fit the written file.",
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
    _add_search_options(parser)
    add_calibration_options(parser)


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
    from llmaas_plugins.elastic.prepared_file import check_is_another, write_prepared
    from llmaas_plugins.elastic.reordering import order_by
    from llmaas_plugins.elastic.units import blocks_of, is_q8_0
    from llmaas_plugins.model.quantize import check_original

    blocks = source_blocks(args.model)
    target = args.output or args.model.with_suffix(".elastic.gguf")
    check_target(target, "-o")
    check_is_another(args.model, target)
    if args.scores is not None and not args.scores.is_file():
        check_target(args.scores, "--scores")
    if args.quantize is not None:
        check_original(args.model)
    check_text(args)
    with stoppable("existing files are unchanged; scores that were computed are kept"):
        scores = _scores(args, blocks)
        is_apart = args.quantize is None and not args.keep_blocks and is_q8_0(args.model)
        if is_apart:
            print("ffn_down is quantized again, so that neurons move one by one (--keep-blocks).")
        order = order_by(replace(blocks, granule=1) if is_apart else blocks, scores)
        with _ordered(args, target, order, takes_blocks_apart=is_apart) as ordered:
            elastic = tried(args, ordered, _described(blocks_of(ordered), scores))
            is_ordered = is_apart or args.quantize is not None
            source = ordered if is_ordered else args.model
            writing = write_prepared(source, target, elastic, order, is_ordered=is_ordered)
            _write("writing", source, writing)
    size, n_levels = target.stat().st_size / 1e6, len(elastic.levels)
    print(f"{target}: {size:,.0f} MB, {n_levels} levels: `llmaas elastic show {target}`.")
    least = elastic.blocks.share(elastic.tables["uniform"][-1])
    if least > elastic.levels[-1]:
        print(
            f"levels below {least:.2f} use that much, too: one group and "
            f"{elastic.step} neurons stay in each layer; other weight types have smaller blocks"
        )
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


def _add_search_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-search",
        dest="is_searched",
        action="store_false",
        help="write only the table `uniform`: searching each layer's widths evaluates the tokens "
        "several hundred times",
    )
    parser.add_argument(
        "--compensate",
        action="store_true",
        help="also fit biases that restore the mean of what a level leaves out; they are kept for "
        "levels whose predictions they improve",
    )


def _scores(args: argparse.Namespace, blocks: Blocks) -> Scores:
    from llmaas_plugins.elastic.scores import read_scores, scores_path

    path = args.scores or scores_path(args.model)
    if path.exists():
        scores = read_scores(path, blocks, args.model)
        found = scores.calibration
        print(f"{path}: scores by {found.method} on {found.n_tokens:,} tokens, computed earlier.")
        if args.text or args.tokens:
            print(f"--text and --tokens have no effect; remove {path} to compute scores again.")
        return scores
    print(f"{args.model}: computing scores; this takes minutes.", flush=True)
    scores = scored(args, blocks)
    try:
        keep(args, path, scores)
    except StoreError as error:  # go on, because computing the scores was the long part
        print(f"scores are not kept: {error} `--scores FILE` keeps them elsewhere.")
    return scores


@contextlib.contextmanager
def _ordered(
    args: argparse.Namespace, target: Path, order: Order, *, takes_blocks_apart: bool
) -> Iterator[Path]:
    """Yield a reordered and possibly quantized copy of the model, deleted afterwards.

    Yield the model itself if nothing is evaluated with it before it is written.
    """
    from llmaas_plugins.elastic.prepared_file import write_reordered
    from llmaas_plugins.model.quantize import quantize

    if not (args.quantize or takes_blocks_apart or args.is_searched or args.compensate):
        yield args.model
        return
    with folder_beside(target) as folder:
        ordered, quantized = folder / "ordered.gguf", folder / "quantized.gguf"
        writing = write_reordered(args.model, ordered, order, takes_blocks_apart=takes_blocks_apart)
        _write("ordering", args.model, writing)
        if args.quantize is None:
            yield ordered
            return
        quantize(ordered, quantized, args.quantize)
        ordered.unlink()
        yield quantized


def _described(blocks: Blocks, scores: Scores) -> Elastic:
    """Return the metadata of a prepared file, with uniform widths."""
    from llmaas_plugins.elastic.metadata import Elastic
    from llmaas_plugins.elastic.uniform import LEVELS, anchors_of, step_of, uniform_widths

    if scores.layers is None:
        raise ConfigError(
            "the scores have no scores of layers; run `llmaas elastic score` to compute them."
        )
    step = step_of(blocks)
    return Elastic(
        blocks=blocks,
        levels=LEVELS,
        step=step,
        tables={"uniform": uniform_widths(blocks, LEVELS, scores.layers, step)},
        anchors=anchors_of(scores.layers),
        calibration=scores.calibration,
        source=None,
        biases={},
    )


def _write(what: str, source: Path, writing: Iterator[int]) -> None:
    with as_store_error(f"cannot read {source}"):
        n_bytes = source.stat().st_size
    with progress_bar(what, "B", n_bytes) as bar:
        for n_done in writing:
            bar.update(n_done)
