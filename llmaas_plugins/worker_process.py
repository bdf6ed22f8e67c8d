"""Processes that answer a command's requests, each with an engine and a memory of its own."""

from __future__ import annotations

import logging
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from llmaas_hooks import LlmaasError
from llmaas_plugins.signals import signals_wait

__all__ = ["WorkerProcess", "worker_process"]

_Spec = TypeVar("_Spec")

_END_S = 10
_log = logging.getLogger("llmaas.worker")


@dataclass(frozen=True, slots=True)
class _Failed:
    """Answer of a process that cannot answer any more."""

    reason: str


class WorkerProcess:
    """A process that answers requests."""

    def __init__(self, name: str, pipe: Connection, then: str) -> None:
        """Take the pipe to a process.

        Args:
            name: Name of the process, for errors.
            pipe: Pipe to it.
            then: Advice for a process that died.
        """
        self._name, self._pipe, self._then = name, pipe, then

    def ask(self, request: object) -> Any:
        """Send a request, and return the answer.

        Raises:
            LlmaasError: The process failed or died.
        """
        with suppress(ConnectionError):  # it died; ``receive`` reports why
            self._pipe.send(request)
        return self.receive()

    def receive(self) -> Any:
        """Return what the process sends next.

        Raises:
            LlmaasError: The process failed or died.
        """
        try:
            answer = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise LlmaasError(
                f"the process of {self._name} died, maybe because it ran out of memory. "
                f"{self._then}"
            ) from error
        if isinstance(answer, _Failed):
            raise LlmaasError(f"{self._name} failed: {answer.reason}")
        return answer


@contextmanager
def worker_process(
    name: str, serve: Callable[[_Spec, Connection], None], spec: _Spec, then: str
) -> Iterator[WorkerProcess]:
    """Run a process inside the block.

    Ctrl-C does not reach it, because the command handles that. At the end of the block, the process
    has seconds to end by itself; after an error, it is killed.

    Args:
        name: Name of the process, for errors.
        serve: Function that serves the pipe until it is closed. An exception that it raises
            becomes an error of the next request.
        spec: Argument of that function.
        then: Advice for a process that died.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(serve, spec, theirs), daemon=True)
    with _started_in_peace():
        process.start()
    theirs.close()
    try:
        yield WorkerProcess(name, ours, then)
        ours.close()
        process.join(timeout=_END_S)
    finally:
        ours.close()
        process.kill()
        process.join()


# -- inside --------------------------------------------------------------------------------------


def _serve(serve: Callable[[_Spec, Connection], None], spec: _Spec, pipe: Connection) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    with suppress(EOFError, ConnectionError):
        try:
            serve(spec, pipe)
        except (EOFError, ConnectionError):
            raise
        except Exception as error:
            _log.debug("the process failed", exc_info=error)
            pipe.send(_Failed(f"{type(error).__name__}: {error}"))


@contextmanager
def _started_in_peace() -> Iterator[None]:
    """Block signals while a process starts, and keep Ctrl-C blocked in that process.

    A terminal sends Ctrl-C to all processes, but only the main one should handle it.
    """
    resource_tracker.ensure_running()  # it would unblock signals if the first start ran it
    with signals_wait():  # also signals that other threads get
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
