"""Grammars for the server's calls, checked in advance and run in another process.

This process never parses a client's text as a grammar, nor converts a client's schema;
``confinement`` makes sure of that.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from llama_cpp import llama_cpp

from llmaas_hooks import request_scope
from llmaas_plugins.server import grammar_worker as worker
from llmaas_plugins.server.refusal import Refusal

__all__ = ["Grammars", "Running", "Wanted"]

_START_S = 120.0
_ANSWER_S = 30.0
"""Longest wait for an answer; a worker ends earlier on its own unless the machine is busy."""
_MOST_KEPT = 64
_ALONE = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "GGML_NO_BACKTRACE": "1",
}
_TOO_MUCH = (
    f"it needs more than {worker.BUILD_S:g} s, {1000 * worker.STEP_S:g} ms a token (with a large "
    f"vocabulary, more) or {worker.MEMORY_BYTES >> 20} MiB, or llama.cpp cannot work with it"
)
_CANDIDATES = np.dtype([("id", "i4"), ("logit", "f4"), ("p", "f4")])


@dataclass(frozen=True, slots=True)
class Wanted:
    """A form that an answer must have.

    Attributes:
        field: Field of the body that asks for the form.
        kind: Whether the text is a grammar in llama.cpp's own form or a JSON schema.
        text: Text of the grammar or schema.
    """

    field: str
    kind: Literal["grammar", "schema"]
    text: str

    def digest(self, app: str | None) -> bytes:
        """Return a digest that identifies this form and the app that wants it."""
        return hashlib.sha256(repr((app, self.kind, self.text)).encode()).digest()

    def mistake(self, message: str) -> Refusal:
        """Return a refusal that names the field and what is wrong with it."""
        return Refusal(400, f"{self.field}: {message}")


class Grammars:
    """Checker and runner of grammars; thread-safe, and starts its process when first needed."""

    def __init__(self, engine: Callable[[], Any]) -> None:
        """Use the ``Llama`` that ``engine()`` returns."""
        self._engine = engine
        self._lock = threading.Lock()  # guards `_known` and `_running`; never held for long
        self._starting = threading.Lock()
        self._worker: _Worker | None = None
        self._known: OrderedDict[bytes, dict[str, str]] = OrderedDict()
        self._running: weakref.WeakSet[Running] = weakref.WeakSet()

    def check(self, wanted: Sequence[Wanted]) -> None:
        """Check that all of these can be built at an acceptable cost.

        Raises:
            Refusal: One of them cannot be built, or costs too much.
        """
        for one in wanted:
            if "mistake" in (found := self._found(one)):
                raise one.mistake(found["mistake"])

    def know(self, wanted: Sequence[Wanted]) -> bool:
        """Return whether all of these were checked recently."""
        digests = [one.digest(request_scope.current().app) for one in wanted]
        with self._lock:
            return all(digest in self._known for digest in digests)

    def converted(self, schema: str) -> str:
        """Convert a schema to a grammar.

        Raises:
            Refusal: The schema costs too much, or becomes a grammar that llama.cpp cannot parse.
            ValueError: The converter does not support the schema.
        """
        wanted = Wanted("schema", "schema", schema)
        found = self._found(wanted)
        if "unknown" in found:
            raise ValueError(found["unknown"])
        if "mistake" in found:
            raise wanted.mistake(found["mistake"])
        return found["grammar"]

    def run(self, text: str) -> Running:
        """Start to run a grammar; a mistake in it is reported when its first tokens are requested.

        Others go on: calls are decoded together, or interrupt each other. Close it when its call
        ends.
        """
        running = Running(self._job({"grammar": text}), self._engine().n_vocab())
        with self._lock:
            self._running.add(running)
        return running

    def close(self) -> None:
        """End the process; the next job starts a new one."""
        with self._lock:
            open_ = list(self._running)
        for running in open_:
            running.close()
        with self._starting:
            if self._worker is not None:
                self._worker.close()
            self._worker = None

    def _found(self, wanted: Wanted) -> dict[str, str]:
        """Look up a form, or have it checked.

        Results are kept for each app separately, or the time of a check would reveal other apps'
        forms.
        """
        digest = wanted.digest(request_scope.current().app)
        with self._lock:
            if (known := self._known.get(digest)) is not None:
                self._known.move_to_end(digest)
                return known
        with contextlib.closing(self._job({"texts": [(wanted.kind, wanted.text)]})) as connection:
            try:
                (found,) = worker.receive_values(connection)
            except (EOFError, OSError):  # not kept: the machine may have been short of memory
                return {"mistake": _TOO_MUCH}
        with self._lock:
            self._known[digest] = found
            while len(self._known) > _MOST_KEPT:
                self._known.popitem(last=False)
        return found

    def _job(self, job: dict[str, Any]) -> socket.socket:
        """Give a job to a child of the worker, and return the connection to the child."""
        with self._starting:
            for _ in range(2):  # an idle worker may just have ended on its own
                if self._worker is None:
                    self._worker = _Worker(self._engine())
                with contextlib.suppress(EOFError, OSError):
                    connection = self._worker.connect()
                    worker.send_values(connection, job)
                    return connection
                self._worker.close()
                self._worker = None
        raise Refusal(503, "The process that checks grammars does not respond. Try again later.")


class Running:
    """A grammar that constrains a call, as sets of tokens that may come next."""

    def __init__(self, connection: socket.socket, n_tokens: int) -> None:
        """Talk to the grammar at the other end of ``connection``."""
        self._connection = connection
        self._n_tokens = n_tokens
        self._allowed: Any = None

    def prepare(self) -> None:
        """Receive the tokens that may come next.

        Raises:
            Refusal: The grammar cannot be built, costs too much, or cannot continue from here.
        """
        if self._allowed is not None:
            return
        try:
            packed = worker.receive_exactly(self._connection, -(-self._n_tokens // 8))
        except (EOFError, OSError):
            raise Refusal(400, f"grammar: {_TOO_MUCH}") from None
        bits = np.frombuffer(packed, np.uint8)
        self._allowed = np.unpackbits(bits, count=self._n_tokens).astype(bool)
        if not self._allowed.any():
            raise Refusal(400, "grammar: no token of this model can come next")

    def apply(self, array: Any) -> None:
        """Rule out all candidates that the grammar does not allow."""
        found = array.contents
        address = ctypes.addressof(found.data.contents)
        content = (llama_cpp.llama_token_data * found.size).from_address(address)
        view = np.frombuffer(content, _CANDIDATES)
        view["logit"][~self._allowed[view["id"]]] = -np.inf

    def accept(self, token: int) -> None:
        """Advance by a token; the worker finds what may follow while the engine evaluates it."""
        self._allowed = None
        with contextlib.suppress(OSError):  # the next `prepare` reports it
            self._connection.sendall(token.to_bytes(4, "little", signed=True))

    def close(self) -> None:
        """End the grammar."""
        self._connection.close()


class _Worker:
    """The worker process, and its control socket."""

    def __init__(self, llama: Any) -> None:
        """Start the worker with the vocabulary of ``llama``.

        Raises:
            Refusal: The worker does not start, or has a different vocabulary.
        """
        self._control, theirs = socket.socketpair()
        self._control.settimeout(_START_S)
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603  our own file
                [sys.executable, "-P", worker.__file__, llama.model_path, str(worker.IDLE_S)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | _ALONE,
                start_new_session=True,  # keeps interrupts at the terminal away from the worker
            )
        self._ending = threading.Lock()
        reaper = threading.Thread(
            target=_reap, args=(self._process, self._ending), name="llmaas-grammars", daemon=True
        )
        with contextlib.suppress(RuntimeError):  # at exit no thread can start; `close` reaps
            reaper.start()
        try:
            found = worker.receive_values(self._control)
        except (EOFError, OSError) as error:
            found = {"error": str(error) or "the process ended"}
        if "error" not in found:
            vocab = llama_cpp.llama_model_get_vocab(llama.model)
            tokens = range(llama.n_vocab())
            ends = [i for i in tokens if llama_cpp.llama_vocab_is_eog(vocab, i)]
            if (found["n_tokens"], found["ends"]) != (len(tokens), ends):
                found = {"error": "kv_overrides change this model's vocabulary"}
        if "error" in found:
            self.close()
            raise Refusal(503, f"Grammars cannot be checked: {found['error']}")

    def connect(self) -> socket.socket:
        """Connect to a new child of the worker.

        Raises:
            EOFError: The worker has ended.
        """
        ours, theirs = socket.socketpair()
        ours.settimeout(_ANSWER_S)
        try:
            with theirs:
                socket.send_fds(self._control, [b"!"], [theirs.fileno()])
            worker.receive_exactly(ours, 1)
        except BaseException:
            ours.close()
            raise
        return ours

    def close(self) -> None:
        """End the worker; its children end when their connections do."""
        self._control.close()
        with self._ending:  # before the process is reaped, its number cannot belong to another one
            self._process.kill()
        self._process.wait()


def _reap(process: subprocess.Popen[bytes], ending: threading.Lock) -> None:
    """Reap a worker that ends on its own, for example when idle."""
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with ending:
        process.wait()
