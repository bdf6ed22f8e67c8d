"""Transfer buffers: a part of the RAM tier through which cells are loaded and saved."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import BudgetError, forks
from llmaas_plugins import _native
from llmaas_plugins._native import KVGeometry
from llmaas_plugins.kv_chunks.store.chunk_ids import CHUNK_TOKENS
from llmaas_plugins.kv_chunks.store.extents import page_round
from llmaas_plugins.kv_chunks.store.ram_space import RamSpace
from llmaas_plugins.signals import signals_wait

__all__ = ["NoRoomNowError", "Staging"]

_SHARE = 16


class NoRoomNowError(BudgetError):
    """The process leaves too little of the RAM tier to the transfer buffers; later it may do."""


class Staging(forks.Forked):
    """A ring of buffers of one segment each, shared by all engines.

    Attributes:
        all_buffers: All buffers as one array, shape ``(n_bytes,)``.
    """

    BUFFERS = 3

    def __init__(self, space: RamSpace, segment_bytes: int = 4 << 20) -> None:
        """Start without buffers; ``segment_chunks`` allocates them.

        Args:
            space: RAM tier that provides the buffers.
            segment_bytes: Wanted bytes of cells in a segment.
        """
        self.all_buffers: NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
        self._lock = forks.lock()
        self._jobs: list[Future[Any]] = []
        self._space = space
        self._segment_bytes = segment_bytes
        forks.watch(self)

    def after_fork(self, *, in_child: bool) -> None:
        """Forget jobs in a forked child, which has none of its parent's threads."""
        if in_child:
            self._jobs.clear()

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Let nobody else use the buffers inside the block.

        A load may have been interrupted before it waited for its jobs. They end first.
        """
        with self._lock:
            self.settle()
            yield

    def settle(self) -> None:
        """Cancel the jobs that write to the buffers, and wait for those that run."""
        with signals_wait():
            wait([job for job in self._jobs if not job.cancel()])
            self._jobs.clear()

    def is_written_by(self, job: Future[Any]) -> None:
        """Let the next user of the buffers wait for ``job``."""
        self._jobs.append(job)

    def segment_chunks(self, geometry: KVGeometry) -> int:
        """Return the chunks in a segment, and grow the buffers to that size if needed.

        A segment has the wanted size, but at most 1/16 of the RAM tier and at least one chunk.

        Raises:
            NoRoomNowError: There is no room for segments of one chunk now.
            BudgetError: The budget has no room for segments of one chunk.
        """
        one = _native.blob_size(geometry, CHUNK_TOKENS)
        each = _native.blob_size(geometry, 2 * CHUNK_TOKENS) - one
        most = min(self._segment_bytes, self._space.capacity // _SHARE)
        n_chunks = max(1, 1 + (most - one) // each)
        with self.used():
            self._grow(self.BUFFERS * page_round(one + (n_chunks - 1) * each))
        return n_chunks

    def buffer(self, i: int) -> NDArray[np.uint8]:
        """Return buffer ``i`` of the ring, shape ``(n_bytes / BUFFERS,)``."""
        n_bytes = len(self.all_buffers) // self.BUFFERS
        start = i % self.BUFFERS * n_bytes
        return self.all_buffers[start : start + n_bytes]

    @signals_wait()  # until these buffers are known as allocated
    def _grow(self, n_bytes: int) -> None:
        if n_bytes <= len(self.all_buffers):
            return
        area = self._space.allocate_buffer(n_bytes)
        if area is None:
            raise self._refusal(n_bytes)
        if len(self.all_buffers):
            self._space.free_buffer(self.all_buffers)
        self.all_buffers = area

    def _refusal(self, n_bytes: int) -> BudgetError:
        needs = f"this model needs {n_bytes} bytes of transfer buffers, but "
        found, usable = f"the RAM tier has only {self._space.capacity}", self._space.usable_bytes
        if self._space.withheld_bytes and n_bytes <= self._space.ram_budget:
            return NoRoomNowError(
                f"{needs}{found} now; raise memory.budget or plugins.flash_weights.memory_budget, "
                "which leaves no more to it"
            )
        if usable < n_bytes <= self._space.ram_budget:
            return NoRoomNowError(
                f"{needs}parked contexts leave only {usable} of the RAM tier now; raise "
                "plugins.kv_chunks.ram_budget, or lower parked_tokens"
            )
        return BudgetError(
            f"{needs}{found}; set plugins.kv_chunks.ram_budget to at least "
            f"{_SHARE * n_bytes // self.BUFFERS}"
        )
