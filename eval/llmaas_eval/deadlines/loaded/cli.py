"""``python -m llmaas_eval.deadlines.loaded``: promises of latency that are kept under load.

    python -m llmaas_eval.deadlines.loaded --tasks FOLDER --out loaded

It sends traces of ElastiLM's six apps to ``llmaas serve``, at their times of arrival, and counts
the promises that are kept. Times are those of a random model of a 200 M shape. The quality of
answers is that of the packaged model, and of a copy of it that is tuned to tasks. Parts:

    goodput    highest arrival rate at which 90 % of all requests keep both limits
    half       highest rate at which FIFO at constant levels keeps half; all systems at that rate
    rates      all systems at the rates of --rates
    answers    answers at all pairs of levels, of the models and of other papers' narrowed ones

System ``ours-shorter`` may shorten prompts, too. It and the baseline LLMLingua-2 + contextual
sparsity need the general encoder of ``llmaas prompts learn``.

Everything is kept in ``--out``: the same command goes on where it was stopped, and a further part
adds to the tables. Only one run at a time may use the folder, and the machine should be idle.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from llmaas_eval.deadlines.loaded.questions import (
    AppQuestions,
    packaged_questions,
    read_questions,
)
from llmaas_eval.deadlines.loaded.report import report
from llmaas_eval.deadlines.loaded.study import MODELS, PARTS, Plan, check_folder, run
from llmaas_eval.deadlines.loaded.systems import KINDS, SYSTEMS
from llmaas_eval.deadlines.loaded.traces import ALPHAS
from llmaas_eval.learning import study_parser
from llmaas_eval.results import write

__all__ = ["main"]

_QUICK = 12


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the tables and write the output; return the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    plan = _plan(args)
    try:
        apps = _apps(args)
        check_folder(args.out, plan, "packaged text" if args.tasks is None else "data sets")
        rows = run(plan, apps, args.out)
    except (OSError, RuntimeError, ValueError) as error:
        parser.error(str(error))
    given = {"data": args.tasks is not None, "scratch": args.scratch is not None}
    settings = asdict(plan) | given
    text = write(args.out / "loaded.json", settings, rows, report)
    sys.stdout.write(f"{text}\n")
    if args.pictures:
        from llmaas_eval.deadlines.loaded.plots import draw

        draw(rows, args.pictures)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = study_parser("deadlines.loaded", __doc__)
    add = parser.add_argument
    add("--tasks", type=Path, metavar="FOLDER", help="folder with the apps' sets; default: text "
        "that is packaged, for times only")  # fmt: skip
    add("--out", type=Path, default=Path("loaded"), help="folder for files; default %(default)s")
    add(
        "--parts", nargs="+", choices=PARTS, default=["goodput", "half"], help="default %(default)s"
    )
    add("--systems", nargs="+", choices=[*SYSTEMS], default=["fifo-whole", "fifo-constant"],
        help="default %(default)s")  # fmt: skip
    add("--kinds", nargs="+", choices=KINDS, default=[*KINDS], help="prompts; default both")
    add("--alpha", nargs="+", type=float, default=[0.0],
        help=f"mixes of apps, such as {ALPHAS}; default 0")  # fmt: skip
    add("--requests", type=int, default=600, help="requests of a trace; default %(default)s")
    add("--rates", nargs="+", type=float, default=[], metavar="R",
        help="rates of part `rates`, in requests a second")  # fmt: skip
    add("--seed", type=int, default=0, help="seed of the traces; default %(default)s")
    add("--idle", type=int, default=5, help="requests of each app that give the promises in ms, on "
        "an idle service; default %(default)s")  # fmt: skip
    add("--models", nargs="+", choices=MODELS, default=[*MODELS], help="models for part `answers`: "
        "the packaged one, and its copy that is tuned to tasks; default both")  # fmt: skip
    add("--tune-tokens", type=int, default=786_432, help="tokens to tune the copy on; default "
        "%(default)s")  # fmt: skip
    add("--scratch", type=Path, metavar="FOLDER", help="models of `python -m llmaas_eval.scratch`, "
        "for part `answers`; default: without them")  # fmt: skip
    add("--shape", choices=("200m", "1b"), default="200m", help="random model; default %(default)s")
    add("--pictures", type=Path, metavar="FOLDER", help="also write PNG plots to FOLDER")
    add("--quick", action="store_true", help="a dozen requests of a tiny model, as a check only")
    return parser


def _plan(args: argparse.Namespace) -> Plan:
    return Plan(
        parts=tuple(args.parts),
        systems=tuple(args.systems),
        kinds=tuple(args.kinds),
        alphas=tuple(args.alpha),
        rates=tuple(args.rates),
        n_requests=_QUICK if args.quick else args.requests,
        seed=args.seed,
        n_idle=1 if args.quick else args.idle,
        shape="tiny" if args.quick else args.shape,
        models=tuple(args.models),
        n_tuned=args.tune_tokens,
        data=args.tasks.absolute().parent if args.tasks and not args.quick else None,
        scratch=args.scratch,
    )


def _apps(args: argparse.Namespace) -> Mapping[str, AppQuestions]:
    if args.tasks is None:
        if "answers" in args.parts:
            raise ValueError("answers need questions: give the folder of the sets with --tasks")
        return packaged_questions()
    return read_questions(args.tasks)
