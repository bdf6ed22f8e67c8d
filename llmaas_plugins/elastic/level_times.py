"""Measured times of a loaded model's levels, for plugins that plan requests."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path

from llama_cpp import llama_cpp

from llmaas_hooks import LevelTimes, LlmaasError, ModelLoad
from llmaas_plugins.elastic.latency import Latency, latency_path
from llmaas_plugins.model.digest import files_now

__all__ = ["level_times", "read_latency"]

_log = logging.getLogger("llmaas.elastic")


def read_latency(load: ModelLoad, table: str) -> Latency | None:
    """Return the times that ``llmaas elastic profile`` kept for a loaded model.

    Args:
        load: Record of the model.
        table: Name of the table of widths.

    Returns:
        The times; None if there are none, or if the file was replaced since it was loaded. A file
        of times that is damaged is logged, and counts as none.
    """
    if not load.files or files_now(load.files[0].path) != load.files:
        return None
    path = Path(load.files[0].path)
    try:
        return Latency.load(latency_path(path, table))
    except LlmaasError as error:
        _log.warning("times of %s are not used: %s", path.name, error)
        return None


def level_times(latency: Latency, ctx: int) -> tuple[LevelTimes, ...]:
    """Return the times of each level with a context's numbers of threads, widest level first.

    A number of threads that was not measured counts as the nearest one that was.
    """
    prompt = _nearest(latency, int(llama_cpp.llama_n_threads_batch(ctx)))
    token = _nearest(latency, int(llama_cpp.llama_n_threads(ctx)))
    return tuple(
        LevelTimes(
            level,
            functools.partial(_seconds, latency.ttft_ms, level, prompt),
            functools.partial(_seconds, latency.tpot_ms, level, token),
        )
        for level in latency.levels
    )


# -- inside --------------------------------------------------------------------------------------


def _nearest(latency: Latency, n_threads: int) -> int:
    return min(latency.threads, key=lambda measured: (abs(measured - n_threads), measured))


def _seconds(
    ms: Callable[[float, int, int], float], level: float, n_threads: int, n_tokens: int
) -> float:
    return ms(level, n_tokens, n_threads) / 1000
