"""Order of the windows to train on, which only depends on a seed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import ConfigError
from llmaas_plugins.training.workers import Workers

__all__ = ["Batches", "Lengths"]


class Lengths:
    """Numbers of steps and tokens that follow from a recipe's ``n_tokens`` and ``n_rows``."""

    __slots__ = ()
    n_tokens: int
    n_rows: int

    def n_steps(self, n_window: int) -> int:
        """Return the number of steps with windows of ``n_window`` tokens."""
        return max(1, round(self.n_tokens / (self.n_rows * n_window)))

    def n_trained(self, n_window: int) -> int:
        """Return the tokens of all steps."""
        return self.n_steps(n_window) * self.n_rows * n_window


class Batches:
    """Batches of windows. All windows are used once before one is used again.

    Attributes:
        n_tokens: Tokens of a batch, of all workers together.
    """

    def __init__(
        self, windows: NDArray[np.int32], n_rows: int, seed: int, workers: Workers | None = None
    ) -> None:
        """Share batches of ``n_rows`` windows among workers.

        Raises:
            ConfigError: The workers cannot have equally many windows of a batch.
        """
        self._workers = workers or Workers()
        if n_rows % self._workers.n:
            raise ConfigError(
                f"{self._workers.n} processes cannot share batches of {n_rows} windows equally. "
                f"Start a number of processes that divides {n_rows}."
            )
        self._windows, self._n_rows, self._seed = windows, n_rows, seed
        self.n_tokens = n_rows * windows.shape[1]

    def at(self, step: int) -> NDArray[np.int32]:
        """Return this worker's windows of a step, ``(n_rows / n_workers, n_tokens)``."""
        places = range(step * self._n_rows, (step + 1) * self._n_rows)
        mine = places[self._workers.rank :: self._workers.n]
        return self._windows[[self._window(place) for place in mine]]

    def _window(self, place: int) -> int:
        turn, at = divmod(place, len(self._windows))
        return int(np.random.default_rng((self._seed, turn)).permutation(len(self._windows))[at])
