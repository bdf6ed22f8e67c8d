"""Grammars for the server's calls: checked before, run in another process.

No text of a client is ever parsed as a grammar, or converted from a schema, in this process:
``confinement`` sees to it.
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
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from llama_cpp import llama_cpp

from llmaas_hooks import ConfigError
from llmaas_patches import serving_app
from llmaas_plugins.service import grammar_worker as worker
from llmaas_plugins.service.refusal import Refusal

__all__ = ["Grammars", "Running", "Wanted", "check_parses"]

_START_S = 120.0
_ANSWER_S = 30.0
"""Longest wait for a worker; it ends earlier on its own, unless the machine is very busy."""
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
    """The form that an answer must have.

    Attributes:
        field: Where the body says so.
        kind: A grammar in llama.cpp's own form, or a JSON schema.
        text: It.
    """

    field: str
    kind: Literal["grammar", "schema"]
    text: str

    def digest(self, app: str | None) -> bytes:
        """Name it, as wanted by an app."""
        return hashlib.sha256(repr((app, self.kind, self.text)).encode()).digest()

    def mistake(self, message: str) -> Refusal:
        """Refuse it."""
        return Refusal(400, f"{self.field}: {message}")


def check_parses(llama: Any, grammar: Any) -> None:
    """See whether llama.cpp can parse an app's own ``LlamaGrammar``; it ends the process if not.

    Raises:
        ConfigError: It cannot.
    """
    text = getattr(grammar, "_grammar", None)
    if not text:
        return
    vocab = llama_cpp.llama_model_get_vocab(llama.model)
    sampler = llama_cpp.llama_sampler_init_grammar(vocab, text.encode(), b"root")
    if not sampler:
        raise ConfigError("grammar: llama.cpp cannot parse it")
    llama_cpp.llama_sampler_free(sampler)


class Grammars:
    """Checks grammars, and runs them. Thread-safe; its process is started when it is needed."""

    def __init__(self, engine: Callable[[], Any]) -> None:
        """Serve the ``Llama`` that ``engine()`` returns."""
        self._engine = engine
        self._lock = threading.Lock()  # of what is known; never held for long
        self._starting = threading.Lock()
        self._worker: _Worker | None = None
        self._known: OrderedDict[bytes, dict[str, str]] = OrderedDict()
        self._running: Running | None = None

    def check(self, wanted: Sequence[Wanted]) -> None:
        """See whether all of them can be built and cost little enough.

        Raises:
            Refusal: One of them cannot, or costs too much.
        """
        for one in wanted:
            if "mistake" in (found := self._found(one)):
                raise one.mistake(found["mistake"])

    def know(self, wanted: Sequence[Wanted]) -> bool:
        """Tell whether all of them were checked not long ago."""
        digests = [one.digest(serving_app()) for one in wanted]
        with self._lock:
            return all(digest in self._known for digest in digests)

    def converted(self, schema: str) -> str:
        """Convert a schema to a grammar.

        Raises:
            Refusal: It costs too much, or becomes a grammar that llama.cpp cannot parse.
            ValueError: The converter does not know what to do with it.
        """
        wanted = Wanted("schema", "schema", schema)
        found = self._found(wanted)
        if "unknown" in found:
            raise ValueError(found["unknown"])
        if "mistake" in found:
            raise wanted.mistake(found["mistake"])
        return found["grammar"]

    def run(self, text: str) -> Running:
        """Begin to run a grammar; a mistake in it is told when its first tokens are asked for.

        The one before ends: one call runs at a time, and llama_cpp keeps samplers for long.
        """
        connection = self._job({"grammar": text})
        if self._running is not None:
            self._running.close()
        self._running = Running(connection, self._engine().n_vocab())
        return self._running

    def close(self) -> None:
        """End the process; another one is started if there is more to do."""
        if self._running is not None:
            self._running.close()
        with self._starting:
            if self._worker is not None:
                self._worker.close()
            self._worker = None

    def _found(self, wanted: Wanted) -> dict[str, str]:
        """Look it up, or have it checked: each app once, or its time would tell of another's."""
        digest = wanted.digest(serving_app())
        with self._lock:
            if (known := self._known.get(digest)) is not None:
                self._known.move_to_end(digest)
                return known
        with contextlib.closing(self._job({"texts": [(wanted.kind, wanted.text)]})) as connection:
            try:
                (found,) = worker.receive_values(connection)
            except (EOFError, OSError):  # not kept: perhaps the machine had no memory left
                return {"mistake": _TOO_MUCH}
        with self._lock:
            self._known[digest] = found
            while len(self._known) > _MOST_KEPT:
                self._known.popitem(last=False)
        return found

    def _job(self, job: dict[str, Any]) -> socket.socket:
        """Give a job to a child of the worker; the connection to it."""
        with self._starting:
            for _ in range(2):  # the worker may just have ended, having had nothing to do
                if self._worker is None:
                    self._worker = _Worker(self._engine())
                with contextlib.suppress(EOFError, OSError):
                    connection = self._worker.connect()
                    worker.send_values(connection, job)
                    return connection
                self._worker.close()
                self._worker = None
        raise Refusal(503, "The process that checks grammars does not work. Try again later.")


class Running:
    """A grammar that a call is bound by, as tokens that may come next."""

    def __init__(self, connection: socket.socket, n_tokens: int) -> None:
        """Ask what runs at the other end."""
        self._connection = connection
        self._n_tokens = n_tokens
        self._allowed: Any = None

    def prepare(self) -> None:
        """Know which tokens may come next.

        Raises:
            Refusal: The grammar cannot be built, costs too much, or does not go on from here.
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
            raise Refusal(400, "grammar: no token of this model can follow here")

    def apply(self, array: Any) -> None:
        """Rule out all other candidates."""
        found = array.contents
        address = ctypes.addressof(found.data.contents)
        content = (llama_cpp.llama_token_data * found.size).from_address(address)
        view = np.frombuffer(content, _CANDIDATES)
        view["logit"][~self._allowed[view["id"]]] = -np.inf

    def accept(self, token: int) -> None:
        """Go on with a token; what may follow is found out while the engine evaluates it."""
        self._allowed = None
        with contextlib.suppress(OSError):  # the next `prepare` says so
            self._connection.sendall(token.to_bytes(4, "little", signed=True))

    def close(self) -> None:
        """End it."""
        self._connection.close()


class _Worker:
    """The process, and the way to it."""

    def __init__(self, llama: Any) -> None:
        """Start it with the vocabulary of ``llama``.

        Raises:
            Refusal: It does not start, or has another vocabulary.
        """
        self._control, theirs = socket.socketpair()
        self._control.settimeout(_START_S)
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603  our own file
                [sys.executable, "-P", str(worker.__file__), llama.model_path],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | _ALONE,
                start_new_session=True,  # an interrupt at the terminal is for the server
            )
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
        """Reach a child of its own.

        Raises:
            EOFError: It has ended.
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
        """End it; its children end when their connections do."""
        self._control.close()
        self._process.kill()
        self._process.wait()
