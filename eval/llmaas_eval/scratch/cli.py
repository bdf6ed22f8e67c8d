"""``python -m llmaas_eval.scratch``: small models trained from scratch, beside narrow levels.

    python -m llmaas_eval.scratch --out scratch

ElastiLM's first rival is a family of small models, each trained from scratch (PFS). Here they are
trained once over the text that the packaged model was trained on, and have as many weights in their
blocks as its levels. The whole shape is trained, too: it shows how good this recipe is. Parts:

    train      train the models that are missing; a GPU is used if torch finds one
    measure    perplexity of these models and of the packaged model's levels, by kind of text

Everything is kept in ``--out``: the same command goes on where it was stopped. The text's tokens
are kept, too, so that part ``train`` needs neither the data sets nor llama.cpp on another machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.data import DATA
from llmaas_eval.learning import (
    has_torch,
    print_document,
    record,
    study_parser,
    texts_by_kind,
    training_text,
)
from llmaas_eval.scratch.report import report
from llmaas_eval.scratch.shapes import SHAPES, path_of
from llmaas_plugins.reference_model import reference_model_path

__all__ = ["main"]

_N_TOKENS = 1024
_PARTS = ("train", "measure")


def main(argv: Sequence[str] | None = None) -> int:
    """Train, measure, and print the table or JSON; return the exit status."""
    if not has_torch():
        return 2
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        if "train" in args.parts:
            _train(args)
        return _measure(args) if "measure" in args.parts else 0
    except (OSError, RuntimeError, ValueError) as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = study_parser("scratch", __doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for models and unfinished runs")
    add("--data", type=Path, default=DATA, help="folder with the data sets; default %(default)s")
    add("--parts", nargs="+", choices=_PARTS, default=[*_PARTS], help="default both")
    add("--levels", nargs="+", type=float, choices=[*SHAPES], default=[*SHAPES], help="default all")
    add("--tokens", type=int, default=1 << 24, help="tokens to learn from; default %(default)s")
    add("--windows", type=int, default=64, help="test windows of 512 tokens; default %(default)s")
    add("--seed", type=int, default=0, help="seed of the first weights; default %(default)s")
    add("--json", action="store_true", help="print JSON instead of a table")
    add("--quick", action="store_true", help="a few windows of packaged text, as a check only")
    return parser


def _train(args: argparse.Namespace) -> None:
    from llmaas_eval.scratch.training import train_from_scratch

    windows = _windows(args)
    for level in args.levels:
        train_from_scratch(SHAPES[level], windows, path_of(args.out, level), args.seed)


def _measure(args: argparse.Namespace) -> int:
    from llmaas_eval.scratch.measuring import rows_of

    kinds = texts_by_kind(args, reference_model_path())
    rows = [*rows_of(args.out, args.levels, kinds, is_quick=args.quick)]
    return print_document(args, record() | {"n_tokens": args.tokens, "rows": rows}, report)


def _windows(args: argparse.Namespace) -> NDArray[np.int32]:
    """Return the text to learn from; tokenize it once."""
    path = args.out / "windows.npz"
    if not path.exists():
        found = training_text(args, reference_model_path(), _N_TOKENS)
        partial = path.with_suffix(".partial.npz")
        np.savez_compressed(partial, windows=found.astype(np.uint16))
        partial.replace(path)
    with np.load(path, allow_pickle=False) as file:
        windows: NDArray[np.int32] = file["windows"].astype(np.int32)
    return windows
