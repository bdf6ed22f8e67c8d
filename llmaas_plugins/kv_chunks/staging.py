"""The two buffers through which cells travel: budgeted, allocated once, about a cache's size."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import BudgetError
from llmaas_plugins import _native
from llmaas_plugins._native import Budget, KVGeometry
from llmaas_plugins.kv_chunks.keys import CHUNK_TOKENS
from llmaas_plugins.kv_chunks.memory import anonymous

__all__ = ["Staging"]

_MOST_BYTES = 4 << 20
_SHARE = 8


class Staging:
    """Transfer buffers, shared by all engines; hold ``lock`` while you use them.

    Attributes:
        lock: Whoever uses the buffers holds it.
        whole: Both buffers as one, shape ``(2 * n_bytes,)``.
    """

    def __init__(self, budget: Budget) -> None:
        """Take an eighth of the budget, 4 MiB at most, for each of the two buffers."""
        self.lock = threading.Lock()
        self._n_bytes = min(_MOST_BYTES, budget.limit // _SHARE)
        budget.reserve(2 * self._n_bytes)
        self.whole = anonymous(2 * self._n_bytes)

    def buffer(self, i: int) -> NDArray[np.uint8]:
        """One of the two, shape ``(n_bytes,)``."""
        start = i % 2 * self._n_bytes
        return self.whole[start : start + self._n_bytes]

    def chunks(self, geometry: KVGeometry) -> int:
        """Chunks of cells that fit one buffer.

        Raises:
            BudgetError: Not even one fits.
        """
        one = _native.blob_size(geometry, CHUNK_TOKENS)
        each = _native.blob_size(geometry, 2 * CHUNK_TOKENS) - one
        n_chunks = 1 + (self._n_bytes - one) // each
        if n_chunks < 1:
            raise BudgetError(
                f"a chunk of this model needs {one} bytes in each transfer buffer, which has "
                f"{self._n_bytes}; set plugins.kv_chunks.ram_budget to at least {one * _SHARE}"
            )
        return n_chunks
