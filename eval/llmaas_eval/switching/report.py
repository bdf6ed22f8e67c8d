"""Replays in numbers: how long switches took, and how many times as long as ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.switching.results import CallResult, RunResult

__all__ = ["Ratio", "Summary", "markdown", "most_contexts", "ratio", "summary", "switches"]

_N_RESAMPLES = 2000
_MIB = 1 << 20


class Summary(NamedTuple):
    """One replay's switches.

    Attributes:
        n: How many there were.
        mean_ms: Latency.
        p50_ms: Likewise.
        p99_ms: Likewise.
        max_ms: Likewise.
        leave_ms: What callers waited for after their replies, mean.
        behind_ms: Work ahead of time behind a reply, mean.
        read_mib: Read from the device, a switch; behind the reply, too.
        written_mib: Written to it, likewise.
        recomputed: Share of the contexts' tokens that were computed again.
        peak_mib: Most memory beyond what the process needs without contexts.
        limit_mib: What it was allowed.
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


class Ratio(NamedTuple):
    """A mean latency over ours, with its paired 95 % interval.

    Attributes:
        value: Of the means.
        low: Lower end.
        high: Upper end.
    """

    value: float
    low: float
    high: float


def switches(run: RunResult) -> list[CallResult]:
    """The calls of another context than the call before."""
    return [call for call in run.calls if call.is_switch]


def summary(run: RunResult) -> Summary:
    """Sum up a replay that ran."""
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


def ratio(run: RunResult, ours: RunResult) -> Ratio:
    """How many times as long as ours, over the same calls."""
    theirs_s, ours_s = _latencies(run), _latencies(ours)
    picks = np.random.default_rng(0).integers(0, len(ours_s), (_N_RESAMPLES, len(ours_s)))
    ratios = theirs_s[picks].mean(axis=1) / ours_s[picks].mean(axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return Ratio(float(theirs_s.mean() / ours_s.mean()), float(low), float(high))


def most_contexts(means_ms: Mapping[int, float], limit_ms: float) -> float:
    """Contexts that can be switched between within ``limit_ms`` on average (LLMS Fig. 10).

    Args:
        means_ms: Mean latency by number of contexts; between two of them it is taken for linear.
        limit_ms: The constraint.
    """
    found, before = 0.0, (1, 0.0)  # one context needs no switch
    for n, mean_ms in sorted(means_ms.items()):
        if mean_ms > limit_ms:
            n_0, ms_0 = before
            return n_0 + (n - n_0) * max(0.0, limit_ms - ms_0) / (mean_ms - ms_0)
        found, before = float(n), (n, mean_ms)
    return found


def markdown(runs: Mapping[str, RunResult], ours: str | None) -> str:
    """A table of the replays of one trace."""
    lines = [
        "| system | mean ms | p50 | p99 | × ours (95 %) | after reply ms | behind ms | "
        "read MiB | written MiB | recomputed | peak of MiB |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    base = runs.get(ours) if ours is not None else None
    for name, run in runs.items():
        if run.failure is not None:
            lines.append(f"| {name} | {run.failure} |" + " |" * 9)
            continue
        s = summary(run)
        times = ratio(run, base) if base is not None and base.failure is None else None
        compared = "" if times is None else f"{times.value:.2f} ({times.low:.2f}–{times.high:.2f})"
        lines.append(
            f"| {name} | {s.mean_ms:.2f} | {s.p50_ms:.2f} | {s.p99_ms:.2f} | {compared} | "
            f"{s.leave_ms:.1f} | {s.behind_ms:.1f} | {s.read_mib:.1f} | {s.written_mib:.1f} | "
            f"{s.recomputed:.1%} | {s.peak_mib:.0f} of {s.limit_mib:.0f} |"
        )
    return "\n".join(lines)


def _latencies(run: RunResult) -> NDArray[np.float64]:
    return np.array([call.switch_s for call in switches(run)])


def _mean(calls: Sequence[CallResult], name: str) -> float:
    return float(np.mean([getattr(call, name) for call in calls]))
