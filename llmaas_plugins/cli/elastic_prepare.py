"""``llmaas elastic prepare`` and ``restore``: files with levels, and their sources."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from llmaas_hooks import ConfigError, StoreError
from llmaas_plugins.cli.elastic_score import (
    add_calibration_options,
    check_text,
    keep,
    scored,
    source_blocks,
)
from llmaas_plugins.cli.elastic_search import tried
from llmaas_plugins.cli.ending import stoppable
from llmaas_plugins.cli.offline import check_target, folder_beside
from llmaas_plugins.cli.output import progress_bar
from llmaas_plugins.file_bytes import as_store_error

if TYPE_CHECKING:
    from llmaas_plugins.elastic.metadata import Elastic
    from llmaas_plugins.elastic.reordering import Order
    from llmaas_plugins.elastic.units import Blocks, Scores

__all__ = ["add_prepare_options", "add_restore_options", "prepare", "restore"]

_TYPES = ("F16", "Q8_0", "Q4_0", "Q4_K", "Q6_K")


def add_prepare_options(parser: argparse.ArgumentParser) -> None:
    """Those of ``prepare``."""
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="default: MODEL.elastic.gguf"
    )
    parser.add_argument(
        "--scores",
        type=Path,
        metavar="FILE",
        help="what matters; written if it is not there (default: MODEL.scores.npz)",
    )
    parser.add_argument(
        "--quantise",
        choices=_TYPES,
        type=str.upper,
        metavar="TYPE",
        help="quantise the model, of F32, F16 or BF16, after its units are in order: "
        f"{', '.join(_TYPES)}",
    )
    parser.add_argument(
        "--no-search",
        dest="is_searched",
        action="store_false",
        help="write the table `uniform` only: a search of each layer's widths evaluates tokens "
        "some hundred times",
    )
    parser.add_argument(
        "--compensate",
        action="store_true",
        help="also find biases that put back the mean of what a level leaves out, for the levels "
        "where that brings predictions nearer to the whole model's",
    )
    add_calibration_options(parser)


def add_restore_options(parser: argparse.ArgumentParser) -> None:
    """Those of ``restore``."""
    parser.add_argument(
        "-o", "--output", type=Path, metavar="MODEL.gguf", required=True, help="where to"
    )


def prepare(args: argparse.Namespace) -> int:
    """Write a model's prepared file."""
    from llmaas_plugins.elastic.prepared_file import check_is_another, write_prepared
    from llmaas_plugins.elastic.reordering import order_by
    from llmaas_plugins.elastic.units import blocks_of
    from llmaas_plugins.quantise import check_original

    blocks = source_blocks(args.model)
    target = args.output or args.model.with_suffix(".elastic.gguf")
    check_target(target, "-o")
    check_is_another(args.model, target)
    if args.scores is not None and not args.scores.is_file():
        check_target(args.scores, "--scores")
    if args.quantise is not None:
        check_original(args.model)
    check_text(args)
    with stoppable("what was there is as it was"):
        scores = _scores(args, blocks)
        order = order_by(blocks, scores)
        with _ordered(args, target, order) as ordered:
            elastic = tried(args, ordered, _described(blocks_of(ordered), scores))
            is_quantised = args.quantise is not None
            source = ordered if is_quantised else args.model
            writing = write_prepared(source, target, elastic, order, is_ordered=is_quantised)
            _write("writing", source, writing)
    size, n_levels = target.stat().st_size / 1e6, len(elastic.levels)
    print(f"{target}: {size:,.0f} MB, {n_levels} levels: `llmaas elastic show {target}`.")
    least = elastic.blocks.share(elastic.tables["uniform"][-1])
    if least > elastic.levels[-1]:
        print(
            f"levels below {least:.2f} use as much as that: a group and {elastic.step} neurons of "
            "each layer stay; other types of weights have smaller blocks"
        )
    return 0


def restore(args: argparse.Namespace) -> int:
    """Write the file that one was prepared from."""
    from llmaas_plugins.elastic.prepared_file import restore

    check_target(args.output, "-o")
    with stoppable("nothing was written"):
        _write("restoring", args.model, restore(args.model, args.output))
    print(f"{args.output}: {args.output.stat().st_size / 1e6:,.0f} MB, as it was.")
    return 0


# -- inside --------------------------------------------------------------------------------------


def _scores(args: argparse.Namespace, blocks: Blocks) -> Scores:
    from llmaas_plugins.elastic.scores import read_scores, scores_path

    path = args.scores or scores_path(args.model)
    if path.exists():
        scores = read_scores(path, blocks, args.model)
        found = scores.calibration
        print(f"{path}: importance by {found.method}, {found.n_tokens:,} tokens, as found before.")
        if args.text or args.tokens:
            print(f"--text and --tokens do not change that; without {path} it is found anew.")
        return scores
    print(f"{args.model}: finding what matters; minutes for a large model.", flush=True)
    scores = scored(args, blocks)
    try:
        keep(args, path, scores)
    except StoreError as error:  # the long part is done
        print(f"what matters is not kept: {error} `--scores FILE` keeps it elsewhere.")
    return scores


@contextlib.contextmanager
def _ordered(args: argparse.Namespace, target: Path, order: Order) -> Iterator[Path]:
    """A model whose units are in order, quantised if that is wanted, as long as this lasts.

    The model itself, where nobody computes with it and it is ordered as it is written.
    """
    from llmaas_plugins.elastic.prepared_file import write_reordered
    from llmaas_plugins.quantise import quantise

    if not (args.quantise or args.is_searched or args.compensate):
        yield args.model
        return
    with folder_beside(target) as folder:
        ordered, quantised = folder / "ordered.gguf", folder / "quantised.gguf"
        _write("ordering", args.model, write_reordered(args.model, ordered, order))
        if args.quantise is None:
            yield ordered
            return
        quantise(ordered, quantised, args.quantise)
        ordered.unlink()
        yield quantised


def _described(blocks: Blocks, scores: Scores) -> Elastic:
    """What a prepared file says of itself."""
    from llmaas_plugins.elastic.metadata import Elastic
    from llmaas_plugins.elastic.uniform import LEVELS, anchors_of, step_of, uniform_widths

    if scores.layers is None:
        raise ConfigError("the scores have none of layers; `llmaas elastic score` makes others.")
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
