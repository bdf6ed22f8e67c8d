"""``python -m llmaas_eval.elastic``: quality of a prepared model by level, and of other methods.

    llmaas elastic prepare model-f16.gguf -o prepared.gguf
    python -m llmaas_eval.elastic --model model-f16.gguf --prepared prepared.gguf

All methods read the same windows of text; the intervals are over windows. Methods are compared at
equal bytes of the blocks' weights; K and V projections count if PREPARED cuts them. A method that
removes whole layers also removes their K and V projections; it gets the next larger number of
layers.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from llmaas_eval.data import (
    DATA,
    TRAINING_TEXT,
    VALIDATION_TEXT,
    documents_by_kind,
    packaged_documents,
    read_documents,
)
from llmaas_eval.elastic.measuring import Material
from llmaas_eval.elastic.methods import METHODS
from llmaas_eval.elastic.report import report
from llmaas_eval.elastic.rows import as_json
from llmaas_eval.elastic.study import PARTS, Choices, study
from llmaas_eval.elastic.texts import windows_of
from llmaas_eval.results import about
from llmaas_plugins.elastic.metadata import read_elastic

__all__ = ["main"]

_N_TOKENS, _N_CALIBRATION = 512, 128
_CHARACTERS = 6
"""Characters to read for a token: more than usual, so that enough tokens are read."""
_LEVELS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study and print its results as tables or JSON; return the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = study(_material(args, Path(folder)), _choices(args))
            always = _always_computed(args.prepared)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if args.pictures:
        from llmaas_eval.elastic.plots import draw

        draw(found, args.pictures)
    document = about() | {"always_computed": always} | as_json(found)
    sys.stdout.write(f"{json.dumps(document) if args.json else report(document)}\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m llmaas_eval.elastic",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="F16 GGUF that PREPARED was made from")
    add("--prepared", type=Path, required=True, help="output of `llmaas elastic prepare` for it")
    add(
        "--text",
        type=Path,
        default=DATA / VALIDATION_TEXT,
        help="text to test; default %(default)s",
    )
    add(
        "--calibration",
        type=Path,
        default=DATA / TRAINING_TEXT,
        help="text to score importance on for other methods, as long as PREPARED's calibration; "
        "default %(default)s",
    )
    add("--windows", type=int, default=64, help="test windows of 512 tokens; default %(default)s")
    add("--levels", type=float, nargs="+", default=_LEVELS, help="default %(default)s")
    add("--methods", nargs="*", choices=METHODS, default=[*METHODS], help="default all")
    add("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="default all")
    add("--json", action="store_true", help="print JSON instead of tables")
    add("--pictures", type=Path, metavar="FOLDER", help="also write PNG plots to FOLDER")
    add("--quick", action="store_true", help="read a few windows of packaged text, as a check only")
    return parser


def _always_computed(prepared: Path) -> float:
    """Return the share of the blocks' bytes that every level computes with: K and V, unless cut."""
    elastic = read_elastic(prepared)
    assert elastic is not None
    return elastic.blocks.computed_share(0.0)


def _choices(args: argparse.Namespace) -> Choices:
    if args.quick:
        return Choices(
            args.parts, args.methods, calibrations=(128,), types=("Q8_0",), continued=(1.0, 0.5)
        )
    return Choices(args.parts, args.methods)


def _material(args: argparse.Namespace, folder: Path) -> Material:
    levels = sorted(args.levels, reverse=True)
    if args.quick:
        windows = windows_of(args.model, packaged_documents(), 2, 64)
        kinds = {"packaged chats": windows}
        return Material(args.model, args.prepared, windows, windows, levels, folder, kinds)
    # Windows are spread evenly over the text, so read 8 times the tokens that they need.
    text = read_documents(args.text, _CHARACTERS * 8 * args.windows * _N_TOKENS)
    training = read_documents(args.calibration, _CHARACTERS * 2 * _N_CALIBRATION * _N_TOKENS)
    others = documents_by_kind(DATA) if "kinds" in args.parts else {}
    return Material(
        args.model,
        args.prepared,
        windows_of(args.model, text, args.windows, _N_TOKENS),
        windows_of(args.model, training, _N_CALIBRATION, _N_TOKENS),
        levels,
        folder,
        {
            kind: windows_of(args.model, found, args.windows, _N_TOKENS)
            for kind, found in others.items()
        },
    )
