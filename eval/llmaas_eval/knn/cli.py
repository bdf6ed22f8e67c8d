"""``python -m llmaas_eval.knn FIGURE --data DIR``: measure a figure or table and write it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from llmaas_eval.data import DATA
from llmaas_eval.knn.methods import METHODS
from llmaas_eval.knn.options import Options
from llmaas_eval.knn.scoring import ScoringSettings
from llmaas_eval.knn.study import FIGURES, draw
from llmaas_eval.knn.users import USERS
from llmaas_plugins.reference_model import reference_model_path

__all__ = ["main"]

_HELP = (
    "users: simulated users and removed near-duplicates; table2: perplexity by method; "
    "table3: users whose interests change; fig9: perplexity by number of pairs; "
    "equal: all methods with as many pairs as Algorithm 2 keeps; "
    "harm: perplexity on unrelated text; ablation: effect of each design choice; "
    "shipped: the datastore's approximate search; generated: text generated with it"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Write ``knn-FIGURE.json``, ``.md`` and, if it has a plot, ``.png``; print the tables.

    Return the exit status.
    """
    parser = argparse.ArgumentParser(prog="python -m llmaas_eval.knn", description=__doc__)
    parser.add_argument("figure", choices=FIGURES, help=_HELP)
    parser.add_argument(
        "--data", type=Path, default=DATA, help="folder with the data sets; default %(default)s"
    )
    parser.add_argument("--model", type=Path, help="GGUF file; default the packaged model")
    parser.add_argument("--users", nargs="+", choices=USERS, help="users; default all")
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=METHODS,
        help="methods of table2 and equal; default all (merging is slow)",
    )
    parser.add_argument(
        "-n", "--tokens", type=int, default=8000, help="tokens scored per user; default %(default)s"
    )
    parser.add_argument(
        "--held", type=int, default=4000, help="tokens to fit settings on; default %(default)s"
    )
    parser.add_argument("--cache", type=Path, help="folder for users' pairs; default in --out")
    parser.add_argument(
        "-o", "--out", type=Path, default=Path("build/eval"), help="folder; default %(default)s"
    )
    args = parser.parse_args(argv)
    options = Options(
        args.data,
        args.model or reference_model_path(),
        args.cache or args.out / "knn-keys",
        args.users or list(USERS),
        args.methods or list(METHODS),
        ScoringSettings(args.tokens, args.held),
        args.out,
    )
    sys.stdout.write(f"{draw(args.figure, options)}\n")
    return 0
