"""A process that builds and runs grammars, so that the server need not.

llama.cpp's grammar parser and schema converter may recurse, copy and loop without bound. A short
text can take gigabytes of memory, hours of time, or crash the process; here that is harmless. This
process holds only the vocabulary and forks a child for each job. A child has a memory limit and a
CPU time budget, and ends when either is used up, or when it crashes. Only its own client is
affected.

The file is run as a script and imports nothing of the suite, so the process is small and starts
quickly.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["STEP_S", "receive_exactly", "receive_values", "send_values"]

BUILD_S = 1.0
"""CPU seconds to convert a schema, parse its grammar and find the first tokens."""
STEP_S = 0.05
"""Least CPU seconds that each further token adds to the budget of a running grammar."""
BURST_STEPS = 4
"""Steps whose CPU time a running grammar may save up, besides a token's own."""
MEMORY_BYTES = 256 << 20
MOST_GRAMMAR_BYTES = 256 << 10
IDLE_S = 600
_TRIED_STEPS = 12
_PLAIN = r"""root ::= ([^"\\\x7F\x00-\x1F] | "\\" ["\\/bfnrt])*"""
"""The inside of a JSON string, which nearly every token matches."""
_TIMES_PLAIN = 4
"""Largest cost of a step of any grammar, in steps of ``_PLAIN``."""
_PLAIN_STEPS = 3
_LENGTH = struct.Struct("<I")
_TOKEN = struct.Struct("<i")


def send_values(connection: socket.socket, values: Any) -> None:
    """Send JSON values."""
    content = json.dumps(values).encode()
    connection.sendall(_LENGTH.pack(len(content)) + content)


def receive_values(connection: socket.socket) -> Any:
    """Receive JSON values that ``send_values`` sent.

    Raises:
        EOFError: The other end is closed.
    """
    (length,) = _LENGTH.unpack(receive_exactly(connection, _LENGTH.size))
    return json.loads(receive_exactly(connection, length))


def receive_exactly(connection: socket.socket, n_bytes: int) -> bytes:
    """Receive exactly ``n_bytes`` bytes.

    Raises:
        EOFError: The other end is closed.
    """
    found = bytearray()
    while len(found) < n_bytes:
        piece = connection.recv(n_bytes - len(found))
        if not piece:
            raise EOFError
        found += piece
    return bytes(found)


class TimeBudget:
    """CPU time budget of this process; the kernel kills the process when it is used up."""

    def __init__(self, step_s: float) -> None:
        """Start with enough to build a grammar; each later step adds ``step_s``."""
        self._step_s = step_s
        self._left_s = BUILD_S + step_s

    def run_from_here(self) -> None:
        """Reset the budget to that of a grammar that starts to run."""
        self._left_s = BURST_STEPS * self._step_s

    @contextlib.contextmanager
    def spent(self) -> Iterator[None]:
        """Charge the block's CPU time to the budget."""
        signal.setitimer(signal.ITIMER_PROF, self._left_s)
        yield
        self._left_s = signal.setitimer(signal.ITIMER_PROF, 0)[0]

    def add_step(self) -> None:
        """Add the CPU time of one more token."""
        self._left_s = min(self._left_s, BURST_STEPS * self._step_s) + self._step_s


class Vocabulary:
    """Vocabulary of a model, without the model's weights."""

    def __init__(self, path: str) -> None:
        """Load the vocabulary from a model file.

        Raises:
            ValueError: llama.cpp cannot load it.
        """
        import numpy as np
        from llama_cpp import llama_cpp

        self.lib = llama_cpp
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.vocab_only, params.use_mmap, params.n_gpu_layers = True, False, 0
        model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        if not model:
            raise ValueError(f"cannot load the vocabulary of {path}")
        self.handle = llama_cpp.llama_model_get_vocab(model)
        self.n_tokens = llama_cpp.llama_vocab_n_tokens(self.handle)
        tokens = range(self.n_tokens)
        self.ends = np.array([llama_cpp.llama_vocab_is_eog(self.handle, i) for i in tokens])
        texts = (llama_cpp.llama_vocab_get_text(self.handle, i) for i in tokens)
        self.lengths = np.array([len(text or b"") for text in texts])
        self._candidates = (llama_cpp.llama_token_data * self.n_tokens)()
        self.view = np.frombuffer(
            self._candidates, np.dtype([("id", "i4"), ("logit", "f4"), ("p", "f4")])
        )
        self.array = llama_cpp.llama_token_data_array(
            data=self._candidates, size=self.n_tokens, selected=-1, sorted=False
        )
        self.ids = np.arange(self.n_tokens)


class Grammar:
    """A grammar and its current state."""

    def __init__(self, vocabulary: Vocabulary, text: str) -> None:
        """Parse a grammar.

        Raises:
            ValueError: llama.cpp cannot parse it.
        """
        self._vocabulary = vocabulary
        lib, handle = vocabulary.lib, vocabulary.handle
        self._sampler = lib.llama_sampler_init_grammar(handle, text.encode(), b"root")
        if not self._sampler:
            raise ValueError("llama.cpp cannot parse it")

    def allowed(self) -> Any:
        """Return a boolean array of the tokens that may come next."""
        found = self._vocabulary
        found.view["id"], found.view["logit"] = found.ids, 0.0
        found.lib.llama_sampler_apply(self._sampler, ctypes.byref(found.array))
        return found.view["logit"] == 0.0

    def accept(self, token: int) -> None:
        """Advance the grammar by a token."""
        self._vocabulary.lib.llama_sampler_accept(self._sampler, token)


def step_budget(vocabulary: Vocabulary) -> float:
    """Return the CPU seconds of a step: more for a large vocabulary or a slow processor.

    llama.cpp checks every token of the vocabulary in each step, so even plain JSON may need more
    than ``STEP_S``.
    """
    grammar, seconds = Grammar(vocabulary, _PLAIN), []
    for _ in range(_PLAIN_STEPS):
        started = time.process_time()
        grammar.allowed()
        seconds.append(time.process_time() - started)
    return max(STEP_S, _TIMES_PLAIN * sorted(seconds)[_PLAIN_STEPS // 2])


def main() -> None:
    """Serve jobs, each on the connection it comes with, until none comes for a while."""
    control = socket.socket(fileno=0)
    try:
        vocabulary = Vocabulary(sys.argv[1])
        step_s = step_budget(vocabulary)
    except (ValueError, OSError) as error:
        send_values(control, {"error": str(error)})
        return
    ends = vocabulary.ends.nonzero()[0].tolist()
    send_values(control, {"n_tokens": vocabulary.n_tokens, "ends": ends})
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps children
    while select.select([control], [], [], float(sys.argv[2]))[0]:
        marker, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not marker:
            return
        if os.fork() == 0:
            control.close()
            with contextlib.suppress(EOFError, OSError):
                _work(vocabulary, step_s, socket.socket(fileno=descriptors[0]))
            os._exit(0)
        os.close(descriptors[0])


def _work(vocabulary: Vocabulary, step_s: float, connection: socket.socket) -> None:
    connection.sendall(b"!")  # if the process ends after this, the job itself caused it
    _limit_memory()
    job = receive_values(connection)
    if "texts" in job:
        found = [_checked(vocabulary, step_s, kind, text) for kind, text in job["texts"]]
        send_values(connection, found)
    else:
        _run(vocabulary, step_s, connection, job["grammar"])


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _checked(vocabulary: Vocabulary, step_s: float, kind: str, text: str) -> dict[str, str]:
    """Build a grammar and try it out; return its text, or the mistake found in it."""
    with TimeBudget(step_s).spent():
        if kind == "schema":
            from llama_cpp.llama_grammar import json_schema_to_gbnf

            try:
                text = json_schema_to_gbnf(text)
            except (MemoryError, RecursionError):
                return {"mistake": "it is nested too deeply, or without end"}
            except Exception as error:  # the converter raises many types of exceptions
                return {"unknown": str(error) or type(error).__name__}
        if (n_bytes := len(text.encode())) > MOST_GRAMMAR_BYTES:
            limit = f"the limit is {MOST_GRAMMAR_BYTES}"
            return {"mistake": f"it becomes a grammar of {n_bytes} bytes, {limit}"}
        try:
            grammar = Grammar(vocabulary, text)
        except ValueError as error:
            return {"mistake": str(error)}
        allowed = grammar.allowed()
    if not allowed.any():
        return {"mistake": "no token of this model can begin it"}
    walk = TimeBudget(step_s)
    walk.run_from_here()
    _try_out(vocabulary, walk, grammar, allowed)
    return {"grammar": text}


def _try_out(vocabulary: Vocabulary, budget: TimeBudget, grammar: Grammar, allowed: Any) -> None:
    """Take some steps within the budget: the longest token, which costs most, or a random one."""
    chance = random.Random(0)  # noqa: S311  the same choices every time
    for i in range(_TRIED_STEPS):
        budget.add_step()
        with budget.spent():
            (tokens,) = (allowed & ~vocabulary.ends).nonzero()
            if not len(tokens):
                return
            longest = tokens[vocabulary.lengths[tokens].argmax()]
            grammar.accept(int(chance.choice(tokens) if i % 2 else longest))
            allowed = grammar.allowed()


def _run(vocabulary: Vocabulary, step_s: float, connection: socket.socket, text: str) -> None:
    """Run a grammar: send the tokens that may come next, receive the one that came, and repeat."""
    import numpy as np

    budget = TimeBudget(step_s)
    with budget.spent():
        grammar = Grammar(vocabulary, text)
        allowed = grammar.allowed()
    budget.run_from_here()
    while True:
        connection.sendall(np.packbits(allowed).tobytes())
        (token,) = _TOKEN.unpack(receive_exactly(connection, _TOKEN.size))
        budget.add_step()
        with budget.spent():
            grammar.accept(token)
            allowed = grammar.allowed()


if __name__ == "__main__":
    main()
