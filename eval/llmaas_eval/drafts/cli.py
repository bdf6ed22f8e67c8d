"""``python -m llmaas_eval.drafts``: drafts by a narrow level, for a model that does not fit.

    python -m llmaas_eval.drafts --out drafts

A random model is streamed within a share of its own bytes, without and with drafts, in alternation.
A random model's levels say other tokens than the whole model. So the drafts are as often right as
those of the packaged model's same level on held-out text: for each draft, one of the packaged
model's is drawn, with its number of right tokens and the probabilities that its level gave them.
All else is real: the level's passes, the verified batches, and the decision how much to draft. The
text is forced to be the same in both runs.

The models and the packaged model's drafts are kept in ``--out``. Only one run at a time may use the
folder, and the machine should be idle.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from llmaas_eval.data import DATA
from llmaas_eval.drafts.report import report
from llmaas_eval.drafts.study import SHAPES, Setting, Study
from llmaas_eval.learning import print_document, study_parser
from llmaas_eval.results import about

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print the tables or JSON; return the exit status."""
    args = _parser().parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.quick:
        args.shape, args.prompts, args.rounds, args.tokens, args.warm = "200m", 4, 2, 16, 32
        args.memory = [1.3]  # the interpreter alone takes half of so small a model's bytes
    setting = Setting(
        args.shape, args.prompts, args.said, args.rounds, args.tokens, args.warm, args.quick
    )
    rows = Study(args.out, args.data, setting).rows(args.memory)
    return print_document(args, about() | {"rows": rows}, report)


def _parser() -> argparse.ArgumentParser:
    parser = study_parser("drafts", __doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for the models and the packaged drafts")
    add("--data", type=Path, default=DATA, help="folder with the data sets; default %(default)s")
    add("--shape", choices=[*SHAPES], default="1b", help="random model; default %(default)s")
    add("--memory", nargs="+", type=float, default=[0.5], help="shares of the model's bytes that "
        "the process may take; default %(default)s")  # fmt: skip
    add("--prompts", type=int, default=64, help="held-out texts; default %(default)s")
    add("--said", type=int, default=32, help="tokens said after each; default %(default)s")
    add("--rounds", type=int, default=12, help="pairs of runs; default %(default)s")
    add("--tokens", type=int, default=64, help="tokens of a run; default %(default)s")
    add("--warm", type=int, default=96, help="tokens before the first pair; default %(default)s")
    add("--json", action="store_true", help="print JSON instead of tables")
    add("--quick", action="store_true", help="a few runs on a smaller model, as a check only")
    return parser
