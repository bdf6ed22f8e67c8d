"""Deferred work on an engine: one background thread, and callers that wait for it.

KV cells are copied out after a call returned, off its caller's path. Until that is done, nothing
else may touch the context; so every wrapped entry point first settles the context's lane.

Work is put in line by any thread, also from inside the garbage collector, which may have stopped
that thread anywhere, in here too: hence no lock is taken to put a job in line or to start the
thread, and each step that changes shared state is one operation of the interpreter.
"""

from __future__ import annotations

import _thread
import logging
import queue
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress

from llmaas_hooks import forks
from llmaas_patches.collecting import Collecting

__all__ = ["Lanes"]

_log = logging.getLogger("llmaas.patches")


class _Job:
    """Work in line.

    Attributes:
        handles: Engine handles whose calls wait for it.
        run: The work.
        is_free: It frees a context: it is done even where all other work is dropped.
        done: Set when it is over.
    """

    __slots__ = ("done", "handles", "is_free", "run")

    def __init__(self, handles: tuple[int, ...], run: Callable[[], None], *, is_free: bool) -> None:
        self.handles = handles
        self.run = run
        self.is_free = is_free
        self.done = threading.Event()


class Lanes(forks.Forked):
    """Pending background jobs by engine handle (a context's and its memory's address)."""

    runs_work = True

    def __init__(self, collecting: Collecting) -> None:
        """Start with no job and no thread; the thread starts with the first job."""
        self.pending: dict[int, _Job] = {}
        self._collecting = collecting
        self._line: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._startable = [True]  # popped by whoever starts the thread
        self._ended = threading.Event()
        self._is_closed = False
        self._workers: set[int] = set()
        self._turn = (
            forks.lock()
        )  # who waits for ``_running``: else the thread would be first again
        self._running = forks.lock()  # while the thread does a job
        self._is_held = False
        forks.watch(self)

    @property
    def is_closed(self) -> bool:
        """Whether the thread has ended: what is put in line now is done at once, or dropped."""
        return self._is_closed

    def defer(
        self, handles: tuple[int, ...], job: Callable[[], None], *, is_free: bool = False
    ) -> None:
        """Queue ``job`` for the engine known under ``handles``; its exception is logged.

        Args:
            handles: The engine's.
            job: The work.
            is_free: It frees a context, and is not dropped after ``close`` or in a forked child.
        """
        made = _Job(handles, job, is_free=is_free)
        try:
            for handle in handles:
                self.pending[handle] = made
            self._line.put(made)
        except BaseException:  # Ctrl-C, perhaps before it was in line: a second time does nothing
            self._line.put(made)
            raise
        if self._is_closed:
            self._drain()
        else:
            self._start()

    def settle(self, handle: int) -> None:
        """Wait until no job is pending for ``handle``. The job itself passes straight through.

        Raises:
            LlmaasError: This thread collects garbage, perhaps with a lock that the job needs, or in
                the middle of the job.
        """
        job = self.pending.get(handle)
        if job is not None:
            self._collecting.require_none()
            self._wait(job)

    def settle_frees(self) -> None:
        """Wait until the contexts in line are freed."""
        for job in list(self.pending.values()):
            if job.is_free:
                self._wait(job)

    def close(self) -> None:
        """Finish what is queued and end the thread; idempotent."""
        if threading.get_ident() not in self._workers:
            self._line.put(None)
            try:
                self._startable.pop()
                self._ended.set()
            except IndexError:
                self._ended.wait()
        self._drain()
        self._is_closed = True
        self._drain()

    def before_fork(self) -> None:
        """Let the running job end, and none begin: a child cannot go on in the middle of one."""
        waits = self._collecting.may_wait()
        with self._turn if waits else nullcontext():
            self._is_held = self._running.acquire(blocking=waits)

    def after_fork(self, *, in_child: bool) -> None:
        """Go on; in the child without the parent's deferred work, which the parent does."""
        if self._is_held:
            self._running.release()
        if not in_child:
            return
        line, self._line = self._line, queue.SimpleQueue()
        self.pending.clear()
        self._workers.intersection_update({threading.get_ident()})
        if not self._is_closed:
            self._startable[:] = [True]
        with suppress(queue.Empty):
            while True:
                job = line.get_nowait()
                if job is not None and job.is_free:
                    self.defer(job.handles, job.run, is_free=True)

    # -- inside ---------------------------------------------------------------------------------

    def _wait(self, job: _Job) -> None:
        if threading.get_ident() in self._workers:
            return
        if not self._start():
            self._drain()
        job.done.wait()

    def _start(self) -> bool:
        """Start the thread unless it runs; False: the system gives none.

        Not by ``threading``, whose own lock this thread may hold where the collector stopped it.
        """
        try:
            self._startable.pop()
        except IndexError:
            return True
        try:
            _thread.start_new_thread(self._work, ())
        except RuntimeError:
            self._startable.append(True)
            return False
        return True

    def _work(self) -> None:
        threading.current_thread().name = "llmaas-lane"
        while (job := self._line.get()) is not None:
            with self._turn:
                self._running.acquire()
            try:
                self._run(job)
            finally:
                self._running.release()
            del job  # and what it holds
        self._ended.set()

    def _drain(self) -> None:
        """Do here what is in line."""
        with suppress(queue.Empty):
            while True:
                job = self._line.get_nowait()
                if job is not None:
                    self._run(job)

    def _run(self, job: _Job) -> None:
        if job.done.is_set():
            return
        here = threading.get_ident()
        is_outermost = here not in self._workers
        self._workers.add(here)
        try:
            if job.is_free or not self._is_closed:
                job.run()
        except Exception:
            _log.exception("deferred work on an engine failed")
        finally:
            if is_outermost:
                self._workers.discard(here)
            for handle in job.handles:
                if self.pending.get(handle) is job:
                    self.pending.pop(handle, None)
            job.done.set()
