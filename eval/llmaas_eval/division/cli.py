"""``python -m llmaas_eval.division``: one memory budget for contexts and weights.

    python -m llmaas_eval.division --out division

It runs four workloads on a random model whose weights do not all fit into memory, with contexts
that do not all fit, either: once with ``[memory] budget``, which divides the memory while requests
run, and once with each of several fixed divisions. The work is the same, and its whole time counts,
from the first request after all contexts were filled. Rounds alternate between the divisions.

Everything is kept in ``--out``: the same command goes on where it was stopped. Only one run at a
time may use the folder, and the machine should be idle.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from llmaas_eval.division.report import report
from llmaas_eval.division.study import SHAPES, Setting, Study
from llmaas_eval.division.workloads import WORKLOADS
from llmaas_eval.learning import print_document, study_parser
from llmaas_eval.results import about

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print the table or JSON; return the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.quick:
        args.shape, args.shares, args.rounds = "tiny", args.shares[:1], 1
        args.contexts, args.tokens, args.turns = 3, 64, 8
    setting = Setting(
        args.shape, args.contexts, args.tokens, args.turns, args.disk, args.memory, args.seed
    )
    rows = [*Study(args.out, setting).rows(args.workloads, args.shares, args.rounds)]
    return print_document(args, about() | {"rows": rows}, report)


def _parser() -> argparse.ArgumentParser:
    parser = study_parser("division", __doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for the model and all runs")
    add("--workloads", nargs="+", choices=[*WORKLOADS], default=[*WORKLOADS], help="default all")
    add("--shares", nargs="*", type=float, default=[0.0, 0.25, 0.5, 0.75, 0.95],
        help="shares that fixed divisions give to contexts; default %(default)s")  # fmt: skip
    add("--shape", choices=[*SHAPES], default="1b", help="random model; default %(default)s")
    add("--contexts", type=int, default=8, help="default %(default)s")
    add("--tokens", type=int, default=1000, help="tokens of a context; default %(default)s")
    add("--turns", type=int, default=48, help="requests of a workload; default %(default)s")
    add("--disk", action="store_true", help="let contexts be stored on disk, too")
    add("--memory", type=float, default=0.5, help="share of the bytes of model and contexts that "
        "they may take; default %(default)s")  # fmt: skip
    add("--rounds", type=int, default=3, help="runs of each; default %(default)s")
    add("--seed", type=int, default=0, help="seed of the workloads; default %(default)s")
    add("--json", action="store_true", help="print JSON instead of a table")
    add("--quick", action="store_true", help="a few requests, as a check only")
    return parser
