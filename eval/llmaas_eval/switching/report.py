"""Summary of replays: latencies of switches, and their ratio to this suite's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.stats import Interval, ratio_of_means
from llmaas_eval.switching.figures import OURS, Case
from llmaas_eval.switching.results import CallResult, RunResult
from llmaas_eval.tables import Maker, NoRowsError, Output, Table, between, bold, only, percent

__all__ = [
    "TABLES",
    "Summary",
    "details",
    "heading",
    "most_contexts",
    "ratio",
    "summary",
    "switches",
]

_MIB = 1 << 20

_Key = tuple[Any, Any]


class Summary(NamedTuple):
    """Switches of one replay.

    Attributes:
        n: Number of switches.
        mean_ms: Mean latency in ms.
        p50_ms: Median latency in ms.
        p99_ms: 99th percentile of the latency in ms.
        max_ms: Highest latency in ms.
        leave_ms: Mean time that a caller waits after its reply, in ms.
        behind_ms: Mean time of work ahead of time after a reply, in ms.
        read_mib: MiB read from the device for each switch, work after the reply included.
        written_mib: MiB written to the device for each switch, work after the reply included.
        recomputed: Share of the contexts' tokens that were computed again.
        peak_mib: Peak of memory in MiB, beyond the memory that the process needs without contexts.
        limit_mib: Limit of that memory in MiB.
    """

    n: int
    mean_ms: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    leave_ms: float
    behind_ms: float
    read_mib: float
    written_mib: float
    recomputed: float
    peak_mib: float
    limit_mib: float


def switches(run: RunResult) -> list[CallResult]:
    """Return the calls whose context differs from the call before."""
    return [call for call in run.calls if call.is_switch]


def summary(run: RunResult) -> Summary:
    """Summarize a replay that succeeded."""
    calls = switches(run)
    ms = 1e3 * _latencies(run)
    n_tokens = sum(call.n_before for call in calls)
    return Summary(
        n=len(calls),
        mean_ms=float(ms.mean()),
        p50_ms=float(np.median(ms)),
        p99_ms=float(np.percentile(ms, 99)),
        max_ms=float(ms.max()),
        leave_ms=1e3 * _mean(calls, "leave_s"),
        behind_ms=1e3 * _mean(calls, "background_s"),
        read_mib=(_mean(calls, "read_bytes") + _mean(calls, "later_read_bytes")) / _MIB,
        written_mib=(_mean(calls, "written_bytes") + _mean(calls, "later_written_bytes")) / _MIB,
        recomputed=sum(call.n_computed + call.n_missing for call in calls) / max(1, n_tokens),
        peak_mib=run.peak_bytes / _MIB,
        limit_mib=run.limit_bytes / _MIB,
    )


def ratio(run: RunResult, ours: RunResult) -> Interval:
    """Return a replay's mean latency as a multiple of this suite's over the same calls."""
    return ratio_of_means(_latencies(run), _latencies(ours))


def most_contexts(means_ms: Mapping[int, float], limit_ms: float) -> float:
    """Return how many contexts can be switched within ``limit_ms`` on average (LLMS Fig. 10).

    Args:
        means_ms: Mean latency in ms by number of contexts; interpolated linearly between them.
        limit_ms: Highest allowed mean latency in ms.
    """
    found, before = 0.0, (1, 0.0)  # one context needs no switch
    for n, mean_ms in sorted(means_ms.items()):
        if mean_ms > limit_ms:
            n_0, ms_0 = before
            return n_0 + (n - n_0) * max(0.0, limit_ms - ms_0) / (mean_ms - ms_0)
        found, before = float(n), (n, mean_ms)
    return found


def details(runs: Mapping[str, RunResult], ours: str | None) -> Table:
    """Return a table of all figures of the replays of one trace."""
    heads = ["system", "mean ms", "p50", "p99", "× ours", "after reply ms", "behind ms"]
    heads += ["MiB read", "MiB written", "recomputed", "peak of MiB"]
    lines = []
    for name, run in runs.items():
        if run.failure is not None:
            lines.append([name, run.failure, *[""] * 9])
            continue
        s = summary(run)
        cells = [*_latency_cells(s), _times(run, runs.get(ours or ""))]
        cells += [f"{s.leave_ms:.1f}", f"{s.behind_ms:.1f}", _mib(s.read_mib), _mib(s.written_mib)]
        cells += [percent(s.recomputed, 1), f"{s.peak_mib:.0f} of {s.limit_mib:.0f}"]
        lines.append([name, *cells])
    return Table(heads, lines, "l".ljust(len(heads), "r"))


def heading(case: Case) -> str:
    """Return the settings of a case as text."""
    return (
        f"{case.pattern}, {case.contexts} contexts of up to {case.max_tokens} tokens, budget "
        f"{case.budget_share:g} of {case.budget_contexts}, a call in {case.rate_minutes:g} min"
    )


# -- tables of eval/results ----------------------------------------------------------------------


def _systems(outputs: Sequence[Output]) -> Table:
    """Show latencies of the systems, for each output's limit of the disk."""
    heads, lines = ["system"], dict[str, list[str]]()
    for output in outputs:
        runs = {case.label: run for case, run in _runs(output, "one")}
        disk_mb = output["settings"]["disk_mb"]
        disk = "disk as it is" if disk_mb is None else f"{disk_mb:g} MB/s"
        heads += [f"{disk}: mean", "p50", "p99", "× ours"]
        for name, run in runs.items():
            cells = [_failure(run), "", "", ""]
            if not run.failure:
                cells = [*_latency_cells(summary(run)), _times(run, runs.get(OURS))]
            lines.setdefault(name, [name]).extend(cells)
    for name, run in runs.items():
        lines[name].append("" if run.failure else _mib(summary(run).read_mib))
    heads.append("MiB read")
    return Table(heads, list(lines.values()), "l".ljust(len(heads), "r"))


def _contexts(outputs: Sequence[Output]) -> Table:
    """Show mean latencies by the number of contexts."""
    runs = _runs(only(outputs), "fig9")
    found = {(case.contexts, case.label): run for case, run in runs}
    numbers = sorted({number for number, _ in found})
    lines = []
    for name in dict.fromkeys(case.label for case, _ in runs):
        show = _best_cell if name == OURS else _mean_cell
        lines.append([name, *(show(found, (number, name), 2) for number in numbers)])
    return Table(["contexts", *map(str, numbers)], lines, "l".ljust(1 + len(numbers), "r"))


def _patterns(outputs: Sequence[Output]) -> Table:
    """Show mean latencies of several traces, each with the most contexts that were replayed."""
    found: dict[_Key, RunResult] = {}
    for output in outputs:
        runs, rows = _runs(output, *_TRACES), dict[str, str]()
        most = max(case.contexts for case, _ in runs)
        label = _TRACES[output["settings"]["figure"]]
        for case, run in runs:
            if case.contexts == most and case.label in _COMPARED:
                first, later = label(case)
                found[rows.setdefault(later, later if rows else first), case.label] = run
    lines = [
        [str(trace), *(_best_cell(found, (trace, name), 1) for name in _COMPARED)]
        for trace in dict.fromkeys(trace for trace, _ in found)
    ]
    return Table(["", *_COMPARED], lines, "lrrrr")


def _techniques(outputs: Sequence[Output]) -> Table:
    """Show latencies without single techniques."""
    runs = {case.label: run for case, run in _runs(only(outputs), "fig13")}
    lines = []
    for label, run in runs.items():
        cells = [_failure(run), "", "", "", ""]
        if not run.failure:
            s = summary(run)
            mib = [_mib(s.read_mib), _mib(s.written_mib)]
            cells = [*_latency_cells(s)[:2], _times(run, runs.get(OURS)), *mib]
        lines.append([_TECHNIQUES.get(label, label), *cells])
    return Table(["", "mean ms", "p50", "× ours", "MiB read", "MiB written"], lines, "lrrrrr")


_TECHNIQUES = {
    "without tolerance-aware compression": "without tolerance-aware compression (`int8`)",
    "with parking": "with parking (8,192 tokens)",
}
_COMPARED = (OURS, "vLLM-SQ in cells", "vLLM-SQ", "Swapping")
_SHARES = {0.125: "an eighth", 0.25: "a quarter", 0.375: "three eighths"}
_TRACES: Mapping[str, Callable[[Case], tuple[str, str]]] = {
    "one": lambda case: (case.pattern, case.pattern),
    "fig15": lambda case: (
        f"{case.pattern}, a call in {_pause(case.rate_minutes)}",
        _pause(case.rate_minutes),
    ),
    "fig11": lambda case: (f"up to {case.max_tokens:,} tokens", f"{case.max_tokens:,}"),
    "fig10": lambda case: (f"budget {_share(case.budget_share)} of f16", _share(case.budget_share)),
}
"""Names of a figure's first trace and of its later ones, by the figure."""

TABLES: Mapping[str, Maker] = {
    "switching": _systems,
    "switching-contexts": _contexts,
    "switching-patterns": _patterns,
    "switching-techniques": _techniques,
}


def _runs(output: Output, *figures: str) -> list[tuple[Case, RunResult]]:
    """Return the replays of an output.

    Raises:
        NoRowsError: It is of another figure.
    """
    if (found := output["settings"]["figure"]) not in figures:
        raise NoRowsError(f"found the output of {found}, expected {' or '.join(figures)}")
    return [
        (Case(**run["case"]), RunResult.from_json({k: v for k, v in run.items() if k != "case"}))
        for run in output["runs"]
    ]


# -- cells ---------------------------------------------------------------------------------------


def _latency_cells(found: Summary) -> list[str]:
    return [f"{ms:.2f}" for ms in (found.mean_ms, found.p50_ms, found.p99_ms)]


def _times(run: RunResult, ours: RunResult | None) -> str:
    """Return a replay's mean latency as a multiple of ours."""
    if ours is None or ours.failure is not None:
        return ""
    if run == ours:
        return "1.00"
    found = ratio(run, ours)
    return between(found, 0 if found.value >= 100 else 2)


def _mean_cell(found: Mapping[_Key, RunResult], key: _Key, digits: int) -> str:
    """Return a mean latency; empty if it was not measured."""
    if (run := found.get(key)) is None or run.failure:
        return "" if run is None else _failure(run)
    mean = summary(run).mean_ms
    return f"{mean:.{0 if mean >= 1000 else digits}f}"


def _best_cell(found: Mapping[_Key, RunResult], key: _Key, digits: int) -> str:
    """Return a mean latency, in bold if it is the lowest of this trace."""
    means = {
        name: summary(run).mean_ms
        for (trace, name), run in found.items()
        if trace == key[0] and not run.failure
    }
    cell = _mean_cell(found, key, digits)
    return bold(cell) if means.get(key[1]) == min(means.values(), default=0) else cell


def _failure(run: RunResult) -> str:
    """Return why a system did not run, without numbers."""
    return (run.failure or "").partition(":")[0]


def _mib(value: float) -> str:
    return f"{value:.1f}" if value else "0"


def _share(share: float) -> str:
    return _SHARES.get(share, f"{share:g}")


def _pause(minutes: float) -> str:
    return f"{minutes:g} min" if minutes >= 1 else f"{60 * minutes:g} s"


def _latencies(run: RunResult) -> NDArray[np.float64]:
    return np.array([call.switch_s for call in switches(run)])


def _mean(calls: Sequence[CallResult], name: str) -> float:
    return float(np.mean([getattr(call, name) for call in calls]))
