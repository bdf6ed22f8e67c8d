"""A figure's replays, and its results so far as files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

from llmaas_eval.results import about
from llmaas_eval.switching.cost import Cost
from llmaas_eval.switching.engine import token_bytes
from llmaas_eval.switching.figures import FIGURES, OURS, Case, Figure
from llmaas_eval.switching.groups import can_limit_memory
from llmaas_eval.switching.plots import contexts_under, draw
from llmaas_eval.switching.report import TABLES, details, heading
from llmaas_eval.switching.results import RunResult
from llmaas_eval.switching.run import Job, measure, run
from llmaas_eval.switching.steps import replay_of
from llmaas_eval.switching.systems.base import Setting
from llmaas_eval.tables import Output, as_markdown
from llmaas_eval.traces import Settings, TraceCall, generate, write_trace

__all__ = ["Options", "study"]

_Runs = Sequence[tuple[Case, RunResult]]


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a figure's replays.

    Attributes:
        model: GGUF file.
        folder: Folder for traces and results.
        n_calls: Number of calls to measure, the last of each trace.
        hours: Length of the traces at the default rate, in hours.
        seed: Seed of the traces.
        disk_mb: Limit of reads and of writes in MB/s; None sets no limit.
        limits_ms: Latency limits of the figures that count contexts, in ms.
        cost: File of the measured cost, written if missing; None measures it for this figure.
    """

    model: Path
    folder: Path
    n_calls: int
    hours: float
    seed: int
    disk_mb: float | None
    limits_ms: Sequence[float]
    cost: Path | None


def study(
    name: str, figure: Figure, cases: Sequence[Case], options: Options
) -> Iterator[tuple[Case, RunResult]]:
    """Replay the cases; write the results so far after each, because somebody may stop.

    The files are ``NAME.json``, ``NAME.md`` and ``NAME.png`` in ``options.folder``.
    """
    options.folder.mkdir(parents=True, exist_ok=True)
    cost = _cost(options, max(case.max_tokens for case in cases))
    each = token_bytes(options.model)
    runs: list[tuple[Case, RunResult]] = []
    for case in cases:
        runs.append((case, run(_job(options, case, cost, each))))
        _save(options.folder / name, figure, options, cost, runs)
        yield runs[-1]


def _cost(options: Options, max_tokens: int) -> Cost:
    """Return the cost of evaluation: read from its file, or measured."""
    if options.cost is not None and options.cost.exists():
        return Cost(**json.loads(options.cost.read_text()))
    cost = measure(options.model, max_tokens)
    if options.cost is not None:
        options.cost.write_text(json.dumps(asdict(cost)))
    return cost


def _job(options: Options, case: Case, cost: Cost, each: int) -> Job:
    calls = _calls(options, case, case.budget_contexts)[1]
    peak = replay_of(calls, case.max_tokens, options.n_calls)
    setting = Setting(
        model=options.model,
        token_bytes=each,
        folder=options.folder,
        budget=int(case.budget_share * peak.peak_tokens * each),
        contexts=case.contexts,
        max_tokens=case.max_tokens,
        options=case.options,
    )
    trace, _ = _calls(options, case, case.contexts)
    disk_bps = None if options.disk_mb is None else int(options.disk_mb * 1e6)
    return Job(case.system, trace, setting, cost, options.n_calls, disk_bps)


def _calls(options: Options, case: Case, contexts: int) -> tuple[Path, Sequence[TraceCall]]:
    """Write a trace to a file; return the file's path and the trace's calls."""
    settings = Settings(
        pattern=case.pattern,
        contexts=contexts,
        hours=options.hours * case.rate_minutes / 5,  # equally many calls at any rate
        rate_minutes=case.rate_minutes,
        max_tokens=case.max_tokens,
        seed=options.seed,
    )
    name = f"trace-{case.pattern}-{contexts}-{case.max_tokens}-{case.rate_minutes:g}"
    path = options.folder / f"{name}-{options.seed}.jsonl"
    trace = generate(settings)
    write_trace(trace, path)
    return path, trace.calls


def _save(base: Path, figure: Figure, options: Options, cost: Cost, runs: _Runs) -> None:
    found = {
        **about(),
        "settings": {
            "figure": next(name for name, one in FIGURES.items() if one is figure),
            "model": options.model.name,
            "n_calls": options.n_calls,
            "disk_mb": options.disk_mb,
        },
        "memory_limited": can_limit_memory(),
        "cost": asdict(cost),
        "runs": [{"case": asdict(case), **result.to_json()} for case, result in runs],
    }
    base.with_suffix(".json").write_text(json.dumps(found))
    base.with_suffix(".md").write_text(_as_markdown(figure, options, cost, runs, found))
    if any(result.failure is None for _, result in runs):
        draw(figure, runs, options.limits_ms, base.with_suffix(".png"))


def _as_markdown(figure: Figure, options: Options, cost: Cost, runs: _Runs, found: Output) -> str:
    errors = [abs(error) for error in cost.errors]
    disk = "without a limit" if options.disk_mb is None else f"{options.disk_mb:g} MB/s each way"
    lines = [
        f"# {figure.title}",
        "",
        f"{options.model.name}, the last {options.n_calls} calls of each trace, disk {disk}. "
        f"Evaluation of n tokens after s: {cost.call_s:.3g} + {cost.token_s:.3g} n + "
        f"{cost.pair_s:.3g} n (s + n/2) seconds; in {len(errors)} real evaluations this was off by "
        f"{sum(errors) / max(1, len(errors)):.1%} on average and {max(errors, default=0):.1%} at "
        "most.",
    ]
    if figure.counts_contexts:
        for limit_ms in options.limits_ms:
            lines += ["", f"Active contexts within {limit_ms:g} ms by {figure.x}:", ""]
            for label, points in contexts_under(figure, runs, limit_ms).items():
                told = ", ".join(f"{x:g}: {n:.1f}" for x, n in points.items())
                lines.append(f"- {label}: {told}")
    for title, part in groupby(runs, key=lambda pair: heading(pair[0])):
        named = {_row(case): result for case, result in part}
        lines += ["", f"## {title}", "", details(named, OURS).as_markdown()]
    return "\n".join([*lines, "", as_markdown(TABLES, [found])]) + "\n"


def _row(case: Case) -> str:
    n_tokens = case.options.get("chunk_tokens")
    return case.label if n_tokens is None else f"{case.label}, chunks of {n_tokens}"
