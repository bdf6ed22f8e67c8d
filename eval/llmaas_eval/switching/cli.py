"""``python -m llmaas_eval.switching``: replay traces on all systems, one figure at a time.

The command writes FIGURE.json (every call), FIGURE.md and FIGURE.png.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from llmaas_eval.models import SHAPE_1B, write_random_model
from llmaas_eval.switching.figures import FIGURES, Grid
from llmaas_eval.switching.groups import can_limit_memory
from llmaas_eval.switching.report import heading, summary
from llmaas_eval.switching.study import Options, study
from llmaas_eval.switching.systems import SYSTEMS

__all__ = ["main"]

_MODEL = Path("build/bench/random-1b-q4_0.gguf")
_PATTERNS = ("markov", "random", "gaussian")


def main(argv: Sequence[str] | None = None) -> int:
    """Make the figure that the command line names; return 1 if a system failed with an error."""
    args = _parser().parse_args(argv)
    figure = FIGURES[args.figure]
    if not args.model.exists() and args.model == _MODEL:
        args.model.parent.mkdir(parents=True, exist_ok=True)
        write_random_model(args.model, SHAPE_1B)
    if not can_limit_memory():
        _say("found no writable cgroup v1 memory controller: memory is NOT limited")
    grid = Grid(
        args.contexts or figure.contexts,
        args.patterns,
        args.systems or figure.systems,
        args.max_tokens,
        args.budget_share,
        json.loads(args.ours),
    )
    cases = list(figure.cases(grid))
    if args.cost is None or not args.cost.exists():
        _say("measuring the cost of evaluation")
    has_failed = False
    for i, (case, found) in enumerate(
        study(args.name or args.figure, figure, cases, _options(args))
    ):
        told = found.failure or f"{summary(found).mean_ms:.2f} ms"
        _say(f"{i + 1}/{len(cases)} {heading(case)}, {case.label}: {told}")
        has_failed = has_failed or (found.failure or "").startswith("failed")
    return int(has_failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m llmaas_eval.switching", description=__doc__)
    parser.add_argument("figure", choices=FIGURES)
    parser.add_argument("--contexts", type=int, nargs="+", metavar="N")
    parser.add_argument("--patterns", nargs="+", default=_PATTERNS, choices=_PATTERNS)
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS))
    parser.add_argument("--calls", type=int, default=100, help="measure the last N of each trace")
    parser.add_argument("--hours", type=float, default=72.0, help="length of the traces")
    parser.add_argument("--seed", type=int, default=0, help="seed of the traces")
    parser.add_argument("--max-tokens", type=int, default=2048, help="longest context")
    parser.add_argument(
        "--budget-share", type=float, default=0.25, help="budget as a share of all f16 cells"
    )
    parser.add_argument("--disk-mb", type=float, help="limit of reads and of writes in MB/s")
    parser.add_argument("--limits-ms", type=float, nargs="+", default=[10.0, 25.0])
    parser.add_argument("--ours", default="{}", metavar="JSON", help="settings of kv_chunks")
    parser.add_argument("--model", type=Path, default=_MODEL)
    parser.add_argument("--folder", type=Path, default=Path("build/eval"), help="output folder")
    parser.add_argument("--name", help="name of the files, instead of the figure's")
    parser.add_argument("--cost", type=Path, help="file of the measured cost; made if missing")
    return parser


def _options(args: argparse.Namespace) -> Options:
    return Options(
        model=args.model,
        folder=args.folder,
        n_calls=args.calls,
        hours=args.hours,
        seed=args.seed,
        disk_mb=args.disk_mb,
        limits_ms=args.limits_ms,
        cost=args.cost,
    )


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
