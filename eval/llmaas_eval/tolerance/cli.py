"""``python -m llmaas_eval.tolerance FIGURE --data DIR``: measure a figure and write it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from llmaas_eval.data import DATA
from llmaas_eval.tolerance.study import DEFAULT_N, FIGURES, Options, draw
from llmaas_eval.weights import f16_copy
from llmaas_plugins.reference_model import reference_model_path

__all__ = ["main"]

_HELP = (
    "perplexity and bytes (fig6b), rivals by task (fig12), bytes against KL (curve), "
    "recall of facts told early and asked for late (recall)"
)
_DEFAULTS = ", ".join(f"{n} ({name})" for name, n in DEFAULT_N.items())


def main(argv: Sequence[str] | None = None) -> int:
    """Write ``tolerance-FIGURE.json``, ``.md`` and ``.png``, and print the text."""
    parser = argparse.ArgumentParser(prog="python -m llmaas_eval.tolerance", description=__doc__)
    parser.add_argument("figure", choices=FIGURES, help=_HELP)
    parser.add_argument(
        "--data", type=Path, default=DATA, help="folder with the data sets; default %(default)s"
    )
    parser.add_argument(
        "--model",
        type=Path,
        help="GGUF file; default: the packaged model with F16 weights; recall needs a trained one",
    )
    parser.add_argument(
        "-n", type=int, help=f"texts of each task, or contexts of each probe; default {_DEFAULTS}"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice of texts")
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        default=Path("build/eval"),
        help="output folder; default %(default)s",
    )
    args = parser.parse_args(argv)
    if args.figure == "recall" and args.model is None:
        parser.error(
            "recall needs --model: a file that python -m llmaas_eval.tolerance.train_recall wrote"
        )
    model = args.model or f16_copy(reference_model_path(), args.out)
    n_each = args.n or DEFAULT_N[args.figure]
    text = draw(args.figure, Options(args.data, model, n_each, args.seed, args.out))
    sys.stdout.write(f"{text}\n")
    return 0
