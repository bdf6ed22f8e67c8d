"""Counters of the plugin, and estimates derived from them."""

from __future__ import annotations

from typing import Any

from llmaas_hooks import RequestStats, forks
from llmaas_plugins.kv_chunks.transfer.cell_loader import LoadResult

__all__ = ["PluginCounters"]


class PluginCounters:
    """Counters since the plugin was activated. Thread-safe."""

    def __init__(self) -> None:
        """Start at zero."""
        self._lock = forks.lock()
        self._values: dict[str, float] = dict.fromkeys(
            (
                "requests",
                "prompt_tokens",
                "reused_tokens",
                "restores",
                "restored_tokens",
                "recomputed_tokens",
                "restore_s",
                "planned_restores",
                "predicted_s",
                "planned_s",
                "saves",
                "save_s",
                "evaluated_tokens",
                "evaluate_s",
            ),
            0,
        )
        self._reasons: list[str] = []

    def request(self, stats: RequestStats) -> None:
        """Count a finished request."""
        self._add(requests=1, prompt_tokens=stats.n_prompt, reused_tokens=stats.n_reused)

    def restored(self, loaded: LoadResult) -> None:
        """Count a load, and compare its planned time with the actual one if there was a plan."""
        self._add(
            restores=1,
            restored_tokens=loaded.n_loaded,
            recomputed_tokens=loaded.n_recomputed,
            restore_s=loaded.actual_s,
        )
        if loaded.predicted_s is not None:
            self._add(planned_restores=1, predicted_s=loaded.predicted_s, planned_s=loaded.actual_s)

    def saved(self, seconds: float) -> None:
        """Count a swap-out of cells."""
        self._add(saves=1, save_s=seconds)

    def evaluated(self, n_tokens: int, seconds: float) -> None:
        """Count an evaluated batch."""
        self._add(evaluated_tokens=n_tokens, evaluate_s=seconds)

    def refused(self, reason: str) -> bool:
        """Note a context that is not served; return True the first time for this reason."""
        with self._lock:
            new = reason not in self._reasons
            if new:
                self._reasons.append(reason)
            return new

    def snapshot(self) -> dict[str, Any]:
        """Return the counters as JSON types; ``recompute_saved_s`` estimates the time saved."""
        with self._lock:
            values: dict[str, Any] = dict(self._values)
            values["left_alone"] = list(self._reasons)
        per_token = values["evaluate_s"] / max(1, values["evaluated_tokens"])
        values["recompute_saved_s"] = values["restored_tokens"] * per_token - values["restore_s"]
        return values

    def _add(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._values[name] += amount
