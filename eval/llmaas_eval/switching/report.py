"""Summary of replays: latencies of switches, and their ratio to this suite's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.markdown import table
from llmaas_eval.stats import Interval, ratio_of_means
from llmaas_eval.switching.figures import Case
from llmaas_eval.switching.results import CallResult, RunResult

__all__ = ["Summary", "heading", "markdown", "most_contexts", "ratio", "summary", "switches"]

_MIB = 1 << 20


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


def markdown(runs: Mapping[str, RunResult], ours: str | None) -> str:
    """Return a Markdown table of the replays of one trace."""
    heads = ["system", "mean ms", "p50", "p99", "× ours (95 %)", "after reply ms", "behind ms"]
    heads += ["read MiB", "written MiB", "recomputed", "peak of MiB"]
    lines = []
    base = runs.get(ours) if ours is not None else None
    for name, run in runs.items():
        if run.failure is not None:
            lines.append([name, run.failure, *[""] * 9])
            continue
        s = summary(run)
        times = ratio(run, base) if base is not None and base.failure is None else None
        compared = "" if times is None else f"{times.value:.2f} ({times.low:.2f}–{times.high:.2f})"
        cells = [name, f"{s.mean_ms:.2f}", f"{s.p50_ms:.2f}", f"{s.p99_ms:.2f}", compared]
        cells += [f"{s.leave_ms:.1f}", f"{s.behind_ms:.1f}", f"{s.read_mib:.1f}"]
        cells += [f"{s.written_mib:.1f}", f"{s.recomputed:.1%}"]
        lines.append([*cells, f"{s.peak_mib:.0f} of {s.limit_mib:.0f}"])
    return table(heads, lines)


def heading(case: Case) -> str:
    """Return the settings of a case as text."""
    return (
        f"{case.pattern}, {case.contexts} contexts of up to {case.max_tokens} tokens, budget "
        f"{case.budget_share:g} of {case.budget_contexts}, a call in {case.rate_minutes:g} min"
    )


def _latencies(run: RunResult) -> NDArray[np.float64]:
    return np.array([call.switch_s for call in switches(run)])


def _mean(calls: Sequence[CallResult], name: str) -> float:
    return float(np.mean([getattr(call, name) for call in calls]))
