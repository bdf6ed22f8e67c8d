"""``python -m llmaas_eval.deadlines.alone``: one promise on each app's whole set.

    python -m llmaas_eval.deadlines.alone --tasks FOLDER --scratch SCRATCH --out alone --pictures .

Each request is served alone: nothing waits. Answers are those of the packaged model and of other
papers' narrowed ones, and times are those of a random model of a 200 M shape. Parts:

    answers    for each promise of a grid, a setting that keeps it is chosen on one half of the
               questions, and judged on the other
    weights    the widest settings that keep each app's promise, with weights in several types
    reordering the same, with the model's units in the order of their importance and in its own
    concise    the same, with prompts that callers have shortened by 15 %
    shares     the whole model's answers to prompts of which words are left out
    memory     peak memory of serving all levels of the random model, or a file for each level
    switching  time to switch to a level, to another file, or to a copy of units

Answers are kept in ``--out``: the same command goes on where it was stopped. For parts ``memory``
and ``switching``, and for the profile that all parts but ``shares`` measure first, the machine
should be idle.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from llmaas_eval.deadlines.alone.overhead import memory, switching
from llmaas_eval.deadlines.alone.parts import PARTS, Plan, questions_of
from llmaas_eval.deadlines.alone.report import report
from llmaas_eval.deadlines.alone.study import Row
from llmaas_eval.deadlines.loaded.baselines import BASELINES, SCRATCH
from llmaas_eval.deadlines.loaded.bench import profiled_model
from llmaas_eval.deadlines.loaded.questions import AppQuestions, packaged_questions, read_questions
from llmaas_eval.deadlines.loaded.traces import APP_NAMES
from llmaas_eval.learning import study_parser
from llmaas_eval.results import write
from llmaas_eval.scratch.shapes import trained
from llmaas_plugins.elastic.latency import Latency

__all__ = ["main"]

_OVERHEAD: Mapping[str, Callable[[Path, Path, int], Iterator[Row]]] = {
    "memory": memory,
    "switching": switching,
}
_QUICK = 4


def main(argv: Sequence[str] | None = None) -> int:
    """Ask, choose, judge, print the tables and write the output; return the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.quick:
        args.out /= "quick"  # no study takes its files for its own
    try:
        rows = _rows(args)
    except (OSError, RuntimeError, ValueError) as error:
        parser.error(str(error))
    names = ("parts", "questions", "apps", "methods", "rounds")
    settings = {name: getattr(args, name) for name in names}
    sys.stdout.write(f"{write(args.out / 'alone.json', settings, rows, report)}\n")
    if args.pictures and "answers" in args.parts:
        from llmaas_eval.deadlines.alone.plots import draw

        draw(rows, args.pictures)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = study_parser("deadlines.alone", __doc__)
    add = parser.add_argument
    add("--tasks", type=Path, metavar="FOLDER", help="folder with the apps' sets")
    add("--apps", nargs="+", choices=APP_NAMES, default=[*APP_NAMES], help="default all")
    add("--out", type=Path, default=Path("alone"), help="folder for files; default %(default)s")
    add("--parts", nargs="+", choices=[*PARTS, *_OVERHEAD], default=["answers"],
        help="default %(default)s")  # fmt: skip
    add("--rounds", type=int, default=10, help="processes of each way of part `memory`, and loads "
        "of each file of part `switching`; default %(default)s")  # fmt: skip
    add("--questions", type=int, default=240, help="most questions a set; default %(default)s")
    add("--methods", nargs="*", choices=[*BASELINES], default=[*BASELINES],
        help="other papers' methods; default all")  # fmt: skip
    add("--scratch", type=Path, metavar="FOLDER", help="models of `python -m llmaas_eval.scratch`; "
        f"default: without {SCRATCH}")  # fmt: skip
    add("--pictures", type=Path, metavar="FOLDER", help="also write PNG plots to FOLDER")
    add("--quick", action="store_true", help="a few questions of packaged text and a tiny model's "
        "times, as a check only; in a folder of its own in --out")  # fmt: skip
    return parser


def _rows(args: argparse.Namespace) -> list[Row]:
    shape = "tiny" if args.quick else "200m"
    profiled = functools.cache(lambda: profiled_model(args.out, shape))
    rows: list[Row] = []
    asking = [PARTS[part] for part in args.parts if part in PARTS]
    if asking:
        plan = _plan(args, lambda: profiled()[1])
        rows += [row for part in asking for row in part(plan)]
    for part in args.parts:
        if part in _OVERHEAD:
            n_rounds = 1 if args.quick else args.rounds
            rows += _OVERHEAD[part](profiled()[0], args.out / "files", n_rounds)
    return rows


def _plan(args: argparse.Namespace, latency: Callable[[], Latency]) -> Plan:
    n = _QUICK if args.quick else args.questions
    sets, question_tokens = questions_of(_apps(args), n)
    scratch = {} if args.scratch is None else trained(args.scratch)
    return Plan(sets, question_tokens, latency, scratch, args.methods, args.out, args.quick)


def _apps(args: argparse.Namespace) -> Mapping[str, AppQuestions]:
    if args.tasks is None and not args.quick:
        raise ValueError("questions are needed: give the folder of the sets with --tasks")
    found = packaged_questions() if args.quick else read_questions(args.tasks)
    return {name: found[name] for name in args.apps}
