"""Deferred work on an engine: one background thread, and callers that wait for it.

KV cells are copied out after a call returned, off its caller's path. Until that is done, nothing
else may touch the context; so every wrapped entry point first settles the context's lane.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

__all__ = ["Lanes"]

_log = logging.getLogger("llmaas.patches")


class Lanes:
    """Pending background jobs by engine handle (a context's and its memory's address)."""

    def __init__(self) -> None:
        """Start with no job and no thread; the thread starts with the first job."""
        self.pending: dict[int, Future[None]] = {}
        self._worker_id: int | None = None
        self._pool = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="llmaas-lane", initializer=self._remember_worker
        )

    def defer(self, handles: tuple[int, ...], job: Callable[[], None]) -> None:
        """Queue ``job`` for the engine known under ``handles``; its exception is logged."""
        future: Future[None] = Future()
        for handle in handles:
            self.pending[handle] = future
        try:
            self._pool.submit(self._run, handles, future, job)
        except RuntimeError:  # the suite or the interpreter is shutting down
            self._done(handles, future)

    def settle(self, handle: int) -> None:
        """Wait until no job is pending for ``handle``. The job itself passes straight through."""
        future = self.pending.get(handle)
        if future is not None and threading.get_ident() != self._worker_id:
            future.result()

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self._pool.shutdown(wait=True)

    def _remember_worker(self) -> None:
        self._worker_id = threading.get_ident()

    def _run(self, handles: tuple[int, ...], future: Future[None], job: Callable[[], None]) -> None:
        try:
            job()
        except Exception:
            _log.exception("deferred work on an engine failed")
        finally:
            self._done(handles, future)

    def _done(self, handles: tuple[int, ...], future: Future[None]) -> None:
        for handle in handles:
            if self.pending.get(handle) is future:
                del self.pending[handle]
        future.set_result(None)
