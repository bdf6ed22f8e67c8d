"""Learning while the device is idle (§3.3): conversations in the inbox become pairs.

A background thread evaluates small batches in its own context. It pauses when a request comes and
resumes after a while without requests. A file that was half learned at exit is learned again after
a restart.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmaas_hooks import ConfigError, Engine, NativeContext, Request, StoreError, forks
from llmaas_hooks.native import States
from llmaas_plugins import process_memory
from llmaas_plugins.chats.exports import load_conversations
from llmaas_plugins.knn_lm.archive.archive import Archive
from llmaas_plugins.knn_lm.build import inbox
from llmaas_plugins.knn_lm.build.archive_source import SelectionParams
from llmaas_plugins.knn_lm.build.encoder import Encoder
from llmaas_plugins.knn_lm.build.ingest import add_conversations, binding_of
from llmaas_plugins.knn_lm.build.update_datastore import (
    is_update_due,
    update_bytes,
    update_datastore,
)

__all__ = ["Learner"]

_log = logging.getLogger("llmaas.knn_lm")

_BATCH = 32
"""Tokens evaluated at a time; a request that arrives meanwhile waits for at most one batch."""
_POLL_S = 1.0
_NICE = 10


class _Stopped(Exception):  # noqa: N818  not an error
    """Signal that the engine is being freed, or the suite ends."""


class Learner(forks.Forked):
    """Background thread that learns, from the first engine until ``close``.

    A fork waits for its batch: weights in files that it computes with would be lost to the child.
    """

    runs_work = True

    def __init__(
        self,
        store: Path,
        key: States,
        params: SelectionParams,
        idle_s: float,
        natives: Mapping[int, NativeContext],
    ) -> None:
        """Prepare to learn; the thread starts with the first request.

        Args:
            store: Directory of the datastore.
            key: Kind of hidden states that serve as keys.
            params: Parameters of selection.
            idle_s: Seconds without a request after which the device is idle.
            natives: Contexts in which hidden states can be read, by address.
        """
        self._store, self._key, self._params, self._idle_s = store, key, params, idle_s
        self._natives = natives
        # not the condition's own `with`: that is Python code, where Ctrl-C may leave it locked
        self._lock = forks.lock()
        self._changed = threading.Condition(self._lock)
        self._evaluating = forks.lock()  # held during each batch
        self._busy: dict[int, set[int]] = {}  # ids of the open requests, by context
        self._last_end = time.monotonic()
        self._retries_at = 0.0
        self._engine: Engine | None = None
        self._is_at_work = self._is_closed = False
        self._is_selection_due = True  # until the archive was looked at
        self._thread: threading.Thread | None = None
        self.n_learned = 0
        self.last_error: str | None = None
        forks.watch(self)

    @property
    def n_waiting(self) -> int:
        """Number of files in the inbox."""
        return len(inbox.waiting_files(self._store))

    def request_began(self, request: Request) -> None:
        """Pause, and keep the request's engine for learning if its model's files are known.

        Otherwise, files that replaced the model's could tie keys to the wrong model.
        """
        engine = request.engine
        with self._lock:
            self._busy.setdefault(engine.ctx, set()).add(id(request))
            if self._engine is None and engine.load is not None:
                self._engine = engine
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(
                    target=self._run, name="llmaas-knn-learning", daemon=True
                )
                self._thread.start()

    def request_ended(self, request: Request) -> None:
        """Note the end of a request; learning resumes a while after that of the last one."""
        with self._lock:
            self._busy.get(request.engine.ctx, set()).discard(id(request))
            self._last_end = time.monotonic()
            self._changed.notify_all()

    def context_freed(self, ctx: int) -> None:
        """Stop using this context's engine; return once nothing of it is in use.

        If this thread is the learning thread, which may hold the last reference, do not wait.
        """
        with self._lock:
            self._busy.pop(ctx, None)
            if self._engine is None or self._engine.ctx != ctx:
                return
            self._engine = None
            self._changed.notify_all()
            if threading.current_thread() is not self._thread:
                self._changed.wait_for(lambda: not self._is_at_work)

    def close(self) -> None:
        """End the thread after the batch that it is evaluating."""
        with self._lock:
            self._is_closed, self._engine = True, None
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def before_fork(self) -> None:
        """Wait for the batch that is being evaluated, and begin no other one."""
        self._evaluating.acquire()

    def after_fork(self, *, in_child: bool) -> None:
        """Close the child's copy: a child has no learning thread, and the parent still learns."""
        self._evaluating.release()
        if in_child:
            self._is_closed, self._is_at_work = True, False
            self._engine = self._thread = None

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # on Linux this sets the priority of this thread alone
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while True:
            with self._lock:
                self._changed.wait(_POLL_S)
                if self._is_closed:
                    return
                engine = self._engine
                if engine is None or not self._is_idle():
                    continue
                self._is_at_work = True
            try:
                self._work(engine)
            except _Stopped:
                pass
            except ReferenceError:
                pass  # the engine was freed, or the suite ends
            except Exception as error:
                self._fail(error)
            finally:
                with self._lock:
                    self._is_at_work = False
                    self._changed.notify_all()

    def _is_idle(self) -> bool:
        now = time.monotonic()
        return not any(self._busy.values()) and now >= max(
            self._last_end + self._idle_s, self._retries_at
        )

    def _pause(self, _n: int = 0) -> None:
        """Wait until the device is idle.

        Raises:
            _Stopped: The engine is being freed.
        """
        with self._lock:
            while self._engine is not None and not self._is_idle():
                self._changed.wait(_POLL_S)
            if self._engine is None:
                raise _Stopped

    def _work(self, engine: Engine) -> None:
        """Learn the complete files in the inbox, then refresh the selection if it is due.

        A selection that failed, for want of memory or of disk space, stays due.
        """
        waiting = [path for path in inbox.waiting_files(self._store) if inbox.is_complete(path)]
        if not (waiting or self._is_selection_due):
            return
        llama = engine.llama
        binding = binding_of(llama, self._key, engine.load)
        with Archive.open(self._store, binding, writable=True) as archive:
            if waiting:
                with Encoder(llama, self._natives, self._key, n_batch=_BATCH) as encoder:
                    encoder.guard = self._evaluating
                    for path in waiting:
                        self._learn(path, archive, llama, encoder)
            self._is_selection_due = is_update_due(archive, self._params)
            if self._is_selection_due:
                n_bytes = update_bytes(archive, self._params)
                with process_memory.reserved(n_bytes, "selecting what was learned"):
                    update_datastore(archive, self._params, self._pause)
                self._is_selection_due = False
        self.last_error = None

    def _learn(self, path: Path, archive: Archive, llama: Any, encoder: Encoder) -> None:
        before = inbox.FileState.of(path)
        try:
            conversations = [(one, path.name) for one in load_conversations(path)]
        except ConfigError as error:
            if _is_still(path, before):
                _log.warning("%s; it is kept as %s", error, inbox.refuse(path).name)
            return
        added = add_conversations(archive, llama, encoder, conversations, between=self._pause)
        self.n_learned += added.n_added
        if _is_still(path, before):
            inbox.erase_learned(path)

    def _fail(self, error: Exception) -> None:
        """Log a new error once, and hold off the next attempt for 60 idle periods."""
        text = str(error)
        if text != self.last_error:
            level = logging.WARNING if isinstance(error, StoreError) else logging.ERROR
            _log.log(level, "learning while idle failed: %s", text, exc_info=error)
        self.last_error = text
        with self._lock:
            self._retries_at = time.monotonic() + 60 * self._idle_s


def _is_still(path: Path, before: inbox.FileState | None) -> bool:
    """Return whether a file is unchanged and complete."""
    return inbox.FileState.of(path) == before and inbox.is_complete(path)
