"""Reports of a demo run: a table, sample texts, JSON and a plot."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import ConfigError
from llmaas_plugins.demo.interval import median_interval
from llmaas_plugins.demo.run import OURS, DemoRun
from llmaas_plugins.demo.worker import CallResult
from llmaas_plugins.run_record import run_record

__all__ = ["COLUMNS", "as_json", "as_table", "as_texts", "save_plot", "three_digits"]

COLUMNS = (
    ("switch_ms_mean", "switch mean", "ms"),
    ("switch_ms_p50", "p50", "ms"),
    ("switch_ms_p99", "p99", "ms"),
    ("leave_ms_p50", "leave p50", "ms"),
    ("enter_ms_p50", "enter p50", "ms"),
    ("enter_ms_p99", "p99", "ms"),
    ("background_ms_p50", "behind p50", "ms"),
    ("first_token_ms_p50", "TTFT p50", "ms"),
    ("decode_tokens_per_s", "decode", "tok/s"),
    ("kv_ram_mib", "KV in RAM", "MiB"),
    ("disk_mib", "disk", "MiB"),
    ("peak_rss_mib", "peak RSS", "MiB"),
)
"""Key, title and unit of each figure."""


def as_json(run: DemoRun) -> dict[str, Any]:
    """Return all measurements as JSON types."""
    options = {key: _plain(value) for key, value in asdict(run.options).items()}
    return {
        "run": run_record(),
        "machine": {"processor": platform.machine(), "system": platform.platform()},
        "options": options,
        "n_contexts": len(run.scripts),
        "n_calls": len(run.trace),
        "ram_budget_bytes": run.ram_budget_bytes,
        "systems": {name: _summary(run, name) for name in run.results},
        "speedup": {
            name: {kind: _speedup(run, name, kind) for kind in ("switch_s", "enter_s")}
            for name in run.results
            if name != OURS
        },
        "calls": {
            name: [asdict(result) for result in results] for name, results in run.results.items()
        },
    }


def as_table(run: DemoRun) -> str:
    """Return the table that ``llmaas demo`` prints."""
    rows = [["system", *(f"{title} ({unit})" for _, title, unit in COLUMNS)]]
    for name in run.results:
        summary = _summary(run, name)
        rows.append([name, *(three_digits(summary[key]) for key, _, _ in COLUMNS)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join([*lines, "", *_conclusions(run)])


def as_texts(run: DemoRun, n_texts: int = 3) -> str:
    """Return up to ``n_texts`` calls with their replies, as generated with the plugins."""
    lines = []
    step = max(1, len(run.trace) // n_texts)
    for i in range(len(run.trace) - 1, -1, -step)[:n_texts]:
        call, result = run.trace[i], run.results[OURS][i]
        script = run.scripts[call.context]
        lines += [
            f"[{script.app}, call {call.turn + 1}, {result.n_context} tokens of context]",
            f"  User: {script.turns[call.turn]}",
            f"  Assistant: {result.text}",
        ]
    return "\n".join(lines)


def save_plot(run: DemoRun, path: Path) -> None:
    """Plot switch latency against context length, and its distribution, to a PNG file.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "matplotlib is not installed. Try `pip install 'llmaas-plugins[plot]'`."
        ) from error
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    by_length, distribution = figure.subplots(1, 2)
    for name, results in run.results.items():
        switched = [r for r in results if r.switch_s is not None]
        ms = 1e3 * _values(results, "switch_s")
        by_length.plot([r.n_context for r in switched], ms, ".", label=name)
        distribution.plot(np.sort(ms), np.linspace(0, 1, len(ms)), label=name)
    by_length.set(xlabel="tokens in the context", ylabel="switch latency (ms)", yscale="log")
    distribution.set(xlabel="switch latency (ms)", ylabel="share of switches", xscale="log")
    distribution.legend()
    figure.suptitle(f"Context switches, {len(run.scripts)} contexts, {run.options.model.name}")
    figure.savefig(path, dpi=120)


def _summary(run: DemoRun, name: str) -> dict[str, float]:
    results, usage = run.results[name], run.usage[name]
    switched = [r for r in results if r.enter_s is not None]
    switch_ms, enter_ms = 1e3 * _values(results, "switch_s"), 1e3 * _values(results, "enter_s")
    decode_s = sum(r.decode_s for r in results)
    mib = 1 << 20
    return {
        "n_switches": len(switch_ms),
        "switch_ms_mean": float(np.mean(switch_ms)),
        "switch_ms_p50": float(np.percentile(switch_ms, 50)),
        "switch_ms_p99": float(np.percentile(switch_ms, 99)),
        "leave_ms_p50": float(np.median([1e3 * r.leave_s for r in switched])),
        "enter_ms_p50": float(np.median(enter_ms)),
        "enter_ms_p99": float(np.percentile(enter_ms, 99)),
        "first_token_ms_p50": float(np.median([1e3 * r.first_token_s for r in results])),
        "decode_tokens_per_s": sum(r.n_decoded for r in results) / max(decode_s, 1e-9),
        "background_ms_p50": float(np.median([1e3 * r.background_s for r in results])),
        "kv_ram_mib": usage.memory_bytes / mib,
        "disk_mib": usage.disk_bytes / mib,
        "peak_rss_mib": usage.peak_rss_bytes / mib,
    }


def _speedup(run: DemoRun, name: str, kind: str = "switch_s") -> dict[str, float]:
    """Return how much faster ours is: the median ratio per call and its 95 % interval."""
    ratios = _values(run.results[name], kind) / _values(run.results[OURS], kind)
    return dict(zip(("median", "low", "high"), median_interval(ratios), strict=True))


def _conclusions(run: DemoRun) -> list[str]:
    lines = [
        f"{len(run.scripts)} contexts, {len(run.trace)} calls. Each system may use "
        f"{run.ram_budget_bytes / (1 << 20):.1f} MiB of RAM, page cache included, for stored "
        f"contexts: {run.options.budget_share:.0%} of their KV cache.",
        "switch = leave + enter: save the context in the engine, then load the called one. "
        "behind: background work after the reply.",
    ]
    for name in run.results:
        if name != OURS:
            s, enter = _speedup(run, name), _speedup(run, name, "enter_s")
            lines.append(
                f"{OURS} switches {s['median']:.1f}× as fast as {name} (paired median, 95 % "
                f"interval {s['low']:.1f}–{s['high']:.1f}); entering alone {enter['median']:.1f}× "
                f"({enter['low']:.1f}–{enter['high']:.1f})."
            )
    return lines


def _values(results: Sequence[CallResult], kind: str) -> NDArray[np.float64]:
    """Return ``switch_s`` or ``enter_s`` of the calls that switched, in seconds."""
    values = (getattr(result, kind) for result in results)
    return np.array([value for value in values if value is not None], dtype=np.float64)


def three_digits(value: float) -> str:
    """Return a positive number with three digits, or with all digits before its point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value
