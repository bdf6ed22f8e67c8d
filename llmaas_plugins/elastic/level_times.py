"""Measured times of a loaded model's levels, for plugins that plan requests."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path

from llama_cpp import llama_cpp

from llmaas_hooks import LevelTimes, LlmaasError, ModelLoad
from llmaas_plugins.elastic.latency import Latency, latency_path
from llmaas_plugins.model.digest import begin_digest, files_now

__all__ = ["ModelTimes", "level_times"]

_PATIENCE_S = 0.1

_log = logging.getLogger("llmaas.elastic")


class ModelTimes:
    """Times that ``llmaas elastic profile`` kept for a loaded model.

    Attributes:
        digest: Digest of the model's file; None while it is unknown.
    """

    def __init__(self, load: ModelLoad, table: str) -> None:
        """Begin to identify the model's file, by which times are kept.

        Args:
            load: Record of the model.
            table: Name of the table of widths.
        """
        self._files, self._table = load.files, table
        self._begun = begin_digest(load.files) if load.files else None
        self._path: Path | None = None
        self.digest: str | None = None
        self._latency: Latency | None = None

    def latency(self) -> Latency | None:
        """Return the times, or None if there are none.

        There are none while the file is being identified, which a call waits for only a moment, and
        if the file was replaced since it was loaded. Damaged times are logged, and count as none.
        """
        try:
            if self._begun is not None:
                digest = self._begun.get(_PATIENCE_S)
                if digest is None:
                    return None  # a later request asks again
                self._begun = None
                model = Path(self._files[0].path)
                if files_now(model) == self._files:
                    self._path = latency_path(model, self._table, digest)
                    self.digest = digest
            if self._latency is None and self._path is not None:  # it may be measured meanwhile
                self._latency = Latency.load(self._path)
        except LlmaasError as error:
            self._begun = self._path = self.digest = None
            _log.warning("times of %s are not used: %s", self._files[0].path, error)
        return self._latency


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
