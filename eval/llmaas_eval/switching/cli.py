"""``python -m llmaas_eval.switching``: replay traces on all systems, one figure at a time.

The command writes FIGURE.json (every call), FIGURE.md and FIGURE.png.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

from llmaas_eval.models import SHAPE_1B, write_random_model
from llmaas_eval.switching.cost import Cost
from llmaas_eval.switching.engine import token_bytes
from llmaas_eval.switching.figures import FIGURES, OURS, Case, Figure, Grid
from llmaas_eval.switching.groups import can_limit_memory
from llmaas_eval.switching.plots import contexts_under, draw
from llmaas_eval.switching.report import markdown, summary
from llmaas_eval.switching.results import RunResult
from llmaas_eval.switching.run import Job, measure, run
from llmaas_eval.switching.steps import plan
from llmaas_eval.switching.systems import SYSTEMS
from llmaas_eval.switching.systems.base import Setting
from llmaas_eval.traces import Settings, generate, write_trace

__all__ = ["main"]

_MODEL = Path("build/bench/random-1b-q4_0.gguf")
_PATTERNS = ("markov", "random", "gaussian")
_MIB = 1 << 20


def main(argv: Sequence[str] | None = None) -> int:
    """Make the figure that the command line names; return 1 if a system failed with an error."""
    args = _parser().parse_args(argv)
    figure = FIGURES[args.figure]
    args.folder.mkdir(parents=True, exist_ok=True)
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
    cost = _cost(args, max(case.max_tokens for case in cases))
    each = token_bytes(args.model)
    runs: list[tuple[Case, RunResult]] = []
    for i, case in enumerate(cases):
        found = run(_job(args, case, cost, each))
        runs.append((case, found))
        told = found.failure or f"{summary(found).mean_ms:.2f} ms"
        _say(f"{i + 1}/{len(cases)} {_title(case)}, {case.label}: {told}")
        _save(args, figure, cost, runs)
    return int(any((found.failure or "").startswith("failed") for _, found in runs))


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


def _cost(args: argparse.Namespace, max_tokens: int) -> Cost:
    """Return the cost of evaluation: read from ``--cost``, or measured."""
    if args.cost is not None and args.cost.exists():
        return Cost(**json.loads(args.cost.read_text()))
    _say("measuring the cost of evaluation")
    cost = measure(args.model, max_tokens)
    if args.cost is not None:
        args.cost.write_text(json.dumps(asdict(cost)))
    return cost


def _job(args: argparse.Namespace, case: Case, cost: Cost, each: int) -> Job:
    peak = plan(_calls(args, case, case.budget_contexts)[1], case.max_tokens, args.calls)
    setting = Setting(
        model=args.model,
        token_bytes=each,
        folder=args.folder,
        budget=int(case.budget_share * peak.peak_tokens * each),
        contexts=case.contexts,
        max_tokens=case.max_tokens,
        options=case.options,
    )
    trace, _ = _calls(args, case, case.contexts)
    disk_bps = None if args.disk_mb is None else int(args.disk_mb * 1e6)
    return Job(case.system, trace, setting, cost, args.calls, disk_bps)


def _calls(args: argparse.Namespace, case: Case, contexts: int) -> tuple[Path, Sequence[Any]]:
    """Write a trace to a file; return the file's path and the trace's calls."""
    settings = Settings(
        pattern=case.pattern,
        contexts=contexts,
        hours=args.hours * case.rate_minutes / 5,  # equally many calls at any rate
        rate_minutes=case.rate_minutes,
        max_tokens=case.max_tokens,
        seed=args.seed,
    )
    path: Path = args.folder / (
        f"trace-{case.pattern}-{contexts}-{case.max_tokens}-{case.rate_minutes:g}-{args.seed}.jsonl"
    )
    trace = generate(settings)
    write_trace(trace, path)
    return path, trace.calls


def _title(case: Case) -> str:
    return (
        f"{case.pattern}, {case.contexts} contexts of up to {case.max_tokens} tokens, budget "
        f"{case.budget_share:g} of {case.budget_contexts}, a call in {case.rate_minutes:g} min"
    )


def _save(
    args: argparse.Namespace, figure: Figure, cost: Cost, runs: list[tuple[Case, RunResult]]
) -> None:
    """Write the results so far, because somebody may stop a long figure."""
    base = args.folder / (args.name or args.figure)
    found = {
        "figure": args.figure,
        "arguments": {name: str(value) for name, value in vars(args).items()},
        "versions": {name: version(name) for name in ("llama-cpp-python", "llmaas-plugins")},
        "machine": f"{platform.machine()}, {platform.release()}",
        "memory_limited": can_limit_memory(),
        "cost": asdict(cost),
        "runs": [{"case": asdict(case), **result.to_json()} for case, result in runs],
    }
    base.with_suffix(".json").write_text(json.dumps(found))
    base.with_suffix(".md").write_text(_as_markdown(args, figure, cost, runs))
    if any(result.failure is None for _, result in runs):
        draw(figure, runs, args.limits_ms, base.with_suffix(".png"))


def _as_markdown(
    args: argparse.Namespace, figure: Figure, cost: Cost, runs: list[tuple[Case, RunResult]]
) -> str:
    errors = [abs(error) for error in cost.errors]
    disk = "without a limit" if args.disk_mb is None else f"{args.disk_mb:g} MB/s each way"
    lines = [
        f"# {figure.title}",
        "",
        f"{args.model.name}, the last {args.calls} calls of each trace, disk {disk}. Evaluation "
        f"of n tokens after s: {cost.call_s:.3g} + {cost.token_s:.3g} n + {cost.pair_s:.3g} "
        f"n (s + n/2) seconds; in {len(errors)} real evaluations this was off by "
        f"{sum(errors) / max(1, len(errors)):.1%} on average and {max(errors, default=0):.1%} at "
        "most.",
    ]
    if figure.counts_contexts:
        for limit_ms in args.limits_ms:
            lines += ["", f"Active contexts within {limit_ms:g} ms by {figure.x}:", ""]
            for label, points in contexts_under(figure, runs, limit_ms).items():
                told = ", ".join(f"{x:g}: {n:.1f}" for x, n in points.items())
                lines.append(f"- {label}: {told}")
    for title, part in groupby(runs, key=lambda pair: _title(pair[0])):
        named = {_row(case): result for case, result in part}
        lines += ["", f"## {title}", "", markdown(named, OURS)]
    return "\n".join(lines) + "\n"


def _row(case: Case) -> str:
    n_tokens = case.options.get("chunk_tokens")
    return case.label if n_tokens is None else f"{case.label}, chunks of {n_tokens}"


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
