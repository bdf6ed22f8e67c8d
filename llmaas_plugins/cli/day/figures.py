"""Figures of the day: promises kept, times, quality and memory of each system."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_plugins.cli.day.run import Day
from llmaas_plugins.cli.day.systems import STATES, TOGETHER, VANILLA
from llmaas_plugins.cli.day.worker import Called
from llmaas_plugins.demo.interval import Interval, interval, resamples
from llmaas_plugins.run_record import run_record

__all__ = ["Figures", "Kept", "as_json", "figures_of", "read_figures", "speed_of"]


class Kept(NamedTuple):
    """Promises to the calls of a system.

    Attributes:
        n_kept: Promises that were kept.
        n_made: Promises that were made.
    """

    n_kept: int
    n_made: int

    @property
    def share(self) -> float:
        """Share of the promises that were kept; 1 if none was made."""
        return self.n_kept / self.n_made if self.n_made else 1.0


class Figures(NamedTuple):
    """Figures of a system.

    Attributes:
        first_kept: Promises of the first token.
        further_kept: Promises of the further tokens.
        first_ms_p50: Median time to the first token.
        first_ms_p99: Time to the first token that 99 % of the calls do not exceed.
        tokens_per_s: Further tokens a second.
        waited_s: Seconds that callers waited in all.
        behind_s: Seconds of work after replies in all.
        speed: Vanilla's seconds of all work over this system's, with its interval over calls.
        agreement: Share of the most likely tokens that are vanilla's, with its interval over calls.
        perplexity: Perplexity of the given replies.
        peak_bytes: Peak memory of the process.
        context_bytes: Most bytes of contexts in memory beside the engine.
        cached_bytes: Most bytes of its contexts' files in the page cache.
    """

    first_kept: Kept
    further_kept: Kept
    first_ms_p50: float
    first_ms_p99: float
    tokens_per_s: float
    waited_s: float
    behind_s: float
    speed: Interval
    agreement: Interval
    perplexity: float
    peak_bytes: int
    context_bytes: int
    cached_bytes: int


def figures_of(day: Day) -> dict[str, Figures]:
    """Return the figures of each system."""
    return {name: _figures(day, name) for name in day.results}


def as_json(day: Day, found: Mapping[str, Figures]) -> dict[str, Any]:
    """Return all measurements, and the figures of each system, as JSON types."""
    options = day.options
    return {
        "run": run_record(),
        "model": str(options.model or day.files.model.name),
        "seed": options.seed,
        "threads": options.threads,
        "seconds": day.seconds,
        "n_contexts": day.n_contexts,
        "n_calls": len(day.calls),
        "memory": {
            "model_bytes": day.model_bytes,
            "contexts_bytes": day.contexts_bytes,
            "share": options.share,
            "shared_bytes": day.shared_bytes,
            "process_budget_bytes": dict(day.budgets),
            "is_vanilla_limited": day.is_vanilla_limited,
        },
        "left_out": dict(day.files.left_out),
        "pace": day.pace._asdict(),
        "systems": {name: _plain(figures) for name, figures in found.items()},
        "speed_of_all_together": {
            than: speed_of(day, TOGETHER, than)._asdict() for than in (VANILLA, STATES)
        },
        "calls": [
            {
                "app": call.app,
                "context": call.context,
                "n_prompt": len(call.prompt),
                "n_answer": len(call.answer),
                "promised_first_s": call.first_s,
                "promised_further_s": call.further_s,
                "systems": {name: _measured(day, name, i) for name in day.results},
            }
            for i, call in enumerate(day.calls)
        ],
    }


def speed_of(day: Day, name: str, than: str) -> Interval:
    """Return another system's seconds of all work over a system's, with its interval over calls."""
    return _ratio(*([_work_s(one) for one in day.results[side]] for side in (than, name)))


def read_figures(plain: Mapping[str, Any]) -> Figures:
    """Return a system's figures as ``as_json`` wrote them."""
    values = dict(plain)
    for key in ("first_kept", "further_kept"):
        values[key] = Kept(**plain[key])
    for key in ("speed", "agreement"):
        values[key] = Interval(**plain[key])
    return Figures(**values)


# -- inside --------------------------------------------------------------------------------------


def _figures(day: Day, name: str) -> Figures:
    results, vanilla, usage = day.results[name], day.results[VANILLA], day.usage[name]
    firsts = [1000 * one.first_s for one in results]
    further_s = sum(one.further_s for one in results)
    losses = [loss for one in results for loss in one.losses]
    first_limits = [call.first_s for call in day.calls]
    further_limits = [
        call.further_s if one.n_further else None
        for call, one in zip(day.calls, results, strict=True)
    ]
    return Figures(
        first_kept=_kept([one.first_s for one in results], first_limits),
        further_kept=_kept([one.token_s for one in results], further_limits),
        first_ms_p50=float(np.percentile(firsts, 50)),
        first_ms_p99=float(np.percentile(firsts, 99)),
        tokens_per_s=sum(one.n_further for one in results) / max(further_s, 1e-9),
        waited_s=sum(one.first_s + one.further_s for one in results),
        behind_s=sum(one.behind_s for one in results),
        speed=speed_of(day, name, VANILLA),
        agreement=_ratio(
            [_n_same(one, other) for one, other in zip(results, vanilla, strict=True)],
            [len(one.best) for one in results],
        ),
        perplexity=math.exp(float(np.mean(losses))),
        peak_bytes=usage.peak_bytes,
        context_bytes=usage.context_bytes,
        cached_bytes=usage.cached_bytes,
    )


def _kept(seconds: Sequence[float], limits: Sequence[float | None]) -> Kept:
    pairs = [(s, limit) for s, limit in zip(seconds, limits, strict=True) if limit is not None]
    return Kept(sum(s <= limit for s, limit in pairs), len(pairs))


def _ratio(above: Sequence[float], below: Sequence[float]) -> Interval:
    """Return the ratio of two sums over the same calls, with its interval."""
    values: NDArray[np.float64] = np.array([above, below], np.float64)
    chosen = values[:, resamples(values.shape[1])].sum(axis=2)
    return interval(float(values[0].sum() / values[1].sum()), chosen[0] / chosen[1])


def _work_s(one: Called) -> float:
    return one.first_s + one.further_s + one.behind_s


def _n_same(one: Called, other: Called) -> int:
    return sum(a == b for a, b in zip(one.best, other.best, strict=True))


def _measured(day: Day, name: str, i: int) -> dict[str, Any]:
    one = day.results[name][i]
    return {
        "first_s": one.first_s,
        "further_s": one.further_s,
        "n_further": one.n_further,
        "behind_s": one.behind_s,
        "n_same": _n_same(one, day.results[VANILLA][i]),
        "loss": sum(one.losses),
    }


def _plain(figures: Figures) -> dict[str, Any]:
    plain = figures._asdict()
    return {
        key: value._asdict() if isinstance(value, Kept | Interval) else value
        for key, value in plain.items()
    }
