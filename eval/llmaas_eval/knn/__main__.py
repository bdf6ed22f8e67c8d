"""``python -m llmaas_eval.knn FIGURE --data DIR``: measure a figure and write it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from llmaas_eval.knn.figures import FIGURES, draw
from llmaas_eval.knn.methods import METHODS
from llmaas_eval.knn.options import Options
from llmaas_eval.knn.study import Plan
from llmaas_eval.knn.users import USERS
from llmaas_plugins.models import reference_model_path

_HELP = (
    "simulated users and what near-duplicates were removed (users), perplexity by method (table2), "
    "interests that change (table3), by the number of pairs (fig9), on unrelated text (harm), "
    "what each choice is worth (ablation), searched as it is shipped (shipped), "
    "text written with it (generated)"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Write ``knn-FIGURE.json``, ``.md`` and maybe ``.png``, and print the text."""
    parser = argparse.ArgumentParser(prog="python -m llmaas_eval.knn", description=__doc__)
    parser.add_argument("figure", choices=FIGURES, help=_HELP)
    parser.add_argument("--data", type=Path, required=True, help="folder with the data sets")
    parser.add_argument("--model", type=Path, help="GGUF; default the packaged one")
    parser.add_argument("--users", nargs="+", choices=USERS, help="default all")
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, help="in table2; default all (merging is slow)"
    )
    parser.add_argument(
        "-n", "--tokens", type=int, default=8000, help="scored of each user; default %(default)s"
    )
    parser.add_argument(
        "--held", type=int, default=4000, help="that settings are fitted on; default %(default)s"
    )
    parser.add_argument("--cache", type=Path, help="folder for users' pairs; default in --out")
    parser.add_argument(
        "-o", "--out", type=Path, default=Path("build/eval"), help="default %(default)s"
    )
    args = parser.parse_args(argv)
    options = Options(
        args.data,
        args.model or reference_model_path(),
        args.cache or args.out / "knn-keys",
        args.users or list(USERS),
        args.methods or list(METHODS),
        Plan(args.tokens, args.held),
        args.out,
    )
    sys.stdout.write(f"{draw(args.figure, options)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
