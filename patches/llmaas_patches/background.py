"""Deferred work on engines: one background thread, and callers that wait for it.

KV cells are copied out in the background after a request has returned. Until that is done, nothing
else may use the context, so every wrapped entry point first waits for the context's pending work.

Any thread can queue work, even inside the garbage collector, which may have interrupted that thread
anywhere, including in this module. Queueing a job and starting the thread therefore take no lock,
and each change of shared state is a single operation of the interpreter.
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

__all__ = ["BackgroundWork"]

_log = logging.getLogger("llmaas.patches")
_LOOK_S = 0.05


class _Flag:
    """Event whose waiting can be interrupted anywhere.

    Ctrl-C inside ``threading.Event`` may leave its lock locked, and who sets it waits forever.
    """

    __slots__ = ("_is_set", "_lock")

    def __init__(self) -> None:
        self._is_set = False
        self._lock = _thread.allocate_lock()
        self._lock.acquire()

    def set(self) -> None:
        self._is_set = True
        with suppress(RuntimeError):  # set before
            self._lock.release()

    def wait(self) -> None:
        while not self._is_set:
            # another waiter that was interrupted may keep the lock, so look again from time to time
            if self._lock.acquire(timeout=_LOOK_S):
                self._lock.release()


class _Job:
    """A queued job.

    Attributes:
        handles: Engine handles whose calls wait for the job.
        run: Function that does the work.
        is_free: Whether the job frees a context; such a job is never dropped.
        done: Flag that is set when the job has ended.
        is_queued: Whether the job is surely in the queue; it may be there twice.
        turns: One entry, which the thread takes that runs the job.
    """

    __slots__ = ("done", "handles", "is_free", "is_queued", "run", "turns")

    def __init__(self, handles: tuple[int, ...], run: Callable[[], None], *, is_free: bool) -> None:
        self.handles = handles
        self.run = run
        self.is_free = is_free
        self.done = _Flag()
        self.is_queued = False
        self.turns = [True]


class BackgroundWork(forks.Forked):
    """Pending background jobs by engine handle (the address of a context or of its memory)."""

    runs_work = True

    def __init__(self, collecting: Collecting) -> None:
        """Start without jobs; the thread starts with the first job."""
        self.pending: dict[int, _Job] = {}
        self._collecting = collecting
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._startable = [True]  # the thread that pops this is the background thread
        self._ended = _Flag()
        self._is_closed = False
        self._workers: set[int] = set()
        self._turn = (
            forks.lock()
        )  # taken before ``_running``, so that a fork gets its turn between two jobs
        self._running = forks.lock()  # held while the thread runs a job
        self._is_held = False
        forks.watch(self)

    @property
    def is_closed(self) -> bool:
        """Whether the thread has ended; new jobs then run at once or are dropped."""
        return self._is_closed

    def defer(
        self, handles: tuple[int, ...], job: Callable[[], None], *, is_free: bool = False
    ) -> None:
        """Queue ``job`` for the engine known under ``handles``; log its exception, if any.

        Args:
            handles: Handles of the engine.
            job: Function that does the work.
            is_free: Whether the job frees a context; such a job is also done after ``close`` and
                in a forked child.
        """
        made = _Job(handles, job, is_free=is_free)
        try:
            for handle in handles:
                self.pending[handle] = made
            self._queue(made)
        except BaseException:  # Ctrl-C, maybe before the put; a job runs only once
            self._queue(made)
            raise
        if self._is_closed:
            self._drain()
        else:
            self._start()

    def settle(self, handle: int) -> None:
        """Wait until no job is pending for ``handle``; return at once inside a job.

        Raises:
            LlmaasError: A job is pending and this thread is collecting garbage: it may hold a lock
                that the job needs, or may have been interrupted inside the job.
        """
        job = self.pending.get(handle)
        if job is not None:
            self._collecting.require_none()
        while job is not None and threading.get_ident() not in self._workers:
            self._wait(job)
            job = self.pending.get(handle)  # the job may have queued another one

    def settle_frees(self) -> None:
        """Wait until all contexts that are queued for freeing are freed."""
        for job in list(self.pending.values()):
            if job.is_free:
                self._wait(job)

    def close(self) -> None:
        """Finish all queued jobs and end the thread; idempotent."""
        if threading.get_ident() not in self._workers:
            self._jobs.put(None)
            if self._start():  # even for no job: only the thread itself says that it has ended
                self._ended.wait()
        self._drain()
        self._is_closed = True
        self._drain()

    def before_fork(self) -> None:
        """Wait for the running job and hold back the next, as a child cannot continue a job."""
        waits = self._collecting.may_wait()
        with self._turn if waits else nullcontext():
            self._is_held = self._running.acquire(blocking=waits)

    def after_fork(self, *, in_child: bool) -> None:
        """Continue; in the child, keep only jobs that free contexts: the parent does the rest."""
        if self._is_held:
            self._running.release()
        if not in_child:
            return
        jobs, self._jobs = self._jobs, queue.SimpleQueue()
        self.pending.clear()
        self._workers.intersection_update({threading.get_ident()})
        self._ended = _Flag()  # a parent's thread may have held the old one's lock
        if self._is_closed:
            self._ended.set()
        else:
            self._startable[:] = [True]
        with suppress(queue.Empty):
            while True:
                job = jobs.get_nowait()
                if job is not None and job.is_free:
                    self.defer(job.handles, job.run, is_free=True)

    # -- inside ---------------------------------------------------------------------------------

    def _queue(self, job: _Job) -> None:
        self._jobs.put(job)
        job.is_queued = True

    def _wait(self, job: _Job) -> None:
        if threading.get_ident() in self._workers:
            return
        if not job.is_queued:  # a signal handler waits, which came before the put that it waits for
            self._queue(job)
        if not self._start():
            self._drain()
        job.done.wait()

    def _start(self) -> bool:
        """Start the thread unless it runs; return False if the system cannot start one.

        ``threading`` is not used, because the collector may have interrupted this thread while it
        held a lock of that module.
        """
        if self._startable:
            try:
                _thread.start_new_thread(self._work, ())
            except RuntimeError:
                return False
        return True

    def _work(self) -> None:
        try:
            self._startable.pop()  # here, where no Ctrl-C comes before the work
        except IndexError:  # another thread was first
            return
        threading.current_thread().name = "llmaas-background"
        while (job := self._jobs.get()) is not None:
            with self._turn:
                self._running.acquire()
            try:
                self._run(job)
            finally:
                self._running.release()
            del job  # do not keep its objects alive while waiting
        self._ended.set()

    def _drain(self) -> None:
        """Run all queued jobs in this thread."""
        with suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is not None:
                    self._run(job)

    def _run(self, job: _Job) -> None:
        try:
            job.turns.pop()
        except IndexError:  # the job was queued twice
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
