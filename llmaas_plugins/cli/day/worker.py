"""A system in a process of its own: it makes calls, and is led through the given replies.

So all systems do the same work, whatever they would have said, and each call tells how well they
predict the reply.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import Tokens, request_scope
from llmaas_plugins.cli.day.trace import Call, Pace
from llmaas_plugins.cli.led import HIGHEST, LOWEST, judged, opened, serve_methods
from llmaas_plugins.machine import peak_bytes

if TYPE_CHECKING:
    from llmaas_plugins.demo.systems import Recompute

__all__ = ["N_TIMED", "Called", "Side", "Usage", "serve"]

N_TIMED = 13
"""Tokens that are led to after each prompt of ``pace``: the first one, and those that are timed."""
_REPEATS = 3
_COLD_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Side:
    """Settings of a system.

    Attributes:
        name: Name of the system.
        model: Path of the GGUF file.
        llama: Further arguments of ``Llama``.
        folder: Folder for the system's files.
        keeps_states: Whether a vanilla app writes a state file for each context.
        config: Configuration of the plugins; None for vanilla.
        beside: Most bytes of contexts outside the engine, in memory and in the page cache.
        streamed: Files of weights that are read again and again; they leave the page cache.
    """

    name: str
    model: Path
    llama: dict[str, Any]
    folder: Path
    keeps_states: bool
    config: dict[str, Any] | None
    beside: int
    streamed: tuple[Path, ...] = ()


class Called(NamedTuple):
    """A call that was made.

    Attributes:
        first_s: Seconds to the first token.
        further_s: Seconds of all further tokens together.
        n_further: Number of further tokens.
        behind_s: Seconds of work after the reply, for which nobody waited.
        best: Most likely token in the place of each token of the reply.
        losses: Negative log-likelihood of each token of the reply, in nats.
    """

    first_s: float
    further_s: float
    n_further: int
    behind_s: float
    best: list[int]
    losses: list[float]

    @property
    def token_s(self) -> float:
        """Mean seconds of a further token; 0 if there was none."""
        return self.further_s / max(self.n_further, 1)


class Usage(NamedTuple):
    """Memory of a system.

    Attributes:
        peak_bytes: Peak resident memory of the process.
        context_bytes: Most bytes that contexts took in memory beside the engine.
        cached_bytes: Most bytes of its files that may have been in the page cache.
        errors: Errors of the plugins by name.
    """

    peak_bytes: int
    context_bytes: int
    cached_bytes: int
    errors: dict[str, Any]


def serve(side: Side, pipe: Connection) -> None:
    """Open the model, and answer requests until the pipe is closed.

    A request is the name of a method of ``_System``, with its arguments.
    """
    with opened(side.model, side.config, **side.llama) as (llama, suite):
        serve_methods(_System(side, llama, suite), pipe)


# -- inside --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Context:
    tokens: Tokens = field(default_factory=lambda: np.zeros(0, np.int32))


class _System:
    def __init__(self, side: Side, llama: Any, suite: Any) -> None:
        self._side, self._llama, self._suite = side, llama, suite
        self._kept = _keeper(side)(llama, side.folder, side.beside)
        self._contexts: dict[int, _Context] = {}
        self._current: int | None = None
        self._context_bytes = self._cached_bytes = 0

    def pace(self, tokens: Sequence[int], lengths: Sequence[int]) -> Pace:
        """Time prompts of some lengths, and further tokens."""
        found = [[self._timed(tokens[:n]) for _ in range(_REPEATS)] for n in lengths]
        firsts, furthers = np.median(np.array(found), axis=1).T
        self._current = None
        self._contexts.clear()
        return Pace(list(lengths), firsts.tolist(), furthers.tolist())

    def call(self, call: Call) -> Called:
        """Make a call."""
        context = self._contexts.setdefault(call.context, _Context())
        started = time.perf_counter()
        if call.context != self._current and len(context.tokens):
            self._kept.enter(call.context, context.tokens, call.prompt)
        times, guide = self._led(call)
        ended = time.perf_counter()
        context.tokens = np.array(self._llama.input_ids[: self._llama.n_tokens], np.int32)
        self._kept.leave(call.context, context.tokens)
        self._kept.background()
        self._write_stored()
        behind_s = time.perf_counter() - ended
        self._current = call.context
        self._trim()
        best, losses = guide.predictions()
        return Called(
            times[0] - started, times[-1] - times[0], len(times) - 1, behind_s, best, losses
        )

    def usage(self) -> Usage:
        """Return what the system used so far."""
        errors = {} if self._suite is None else dict(self._suite.status()["errors"])
        return Usage(peak_bytes(), self._context_bytes, self._cached_bytes, errors)

    def _write_stored(self) -> None:
        """Wait until contexts are written; their writes would disturb the next system's call."""
        if self._suite is not None and "kv_chunks" in self._suite.config.enabled():
            self._suite.plugin("kv_chunks").written()

    def _timed(self, tokens: Sequence[int]) -> tuple[float, float]:
        self._llama.reset()
        np.zeros(_COLD_BYTES, np.uint8).fill(1)  # between calls, others use the processor's caches
        answer = [int(tokens[0])] * N_TIMED
        started = time.perf_counter()
        times, _ = self._led(Call("", -1, tokens, answer))
        return times[0] - started, (times[-1] - times[0]) / (N_TIMED - 1)

    def _led(self, call: Call) -> tuple[list[float], _Guide]:
        """Lead through a reply; return the time of each token."""
        from llama_cpp import LogitsProcessorList

        guide, times = _Guide(call.answer), []
        options = {"temp": 0.0, "logits_processor": LogitsProcessorList([guide])}
        with (
            request_scope.serving_context(None, call.app),
            _promised(call),
            contextlib.closing(self._llama.generate(call.prompt, **options)) as tokens,
        ):
            for _ in call.answer:
                next(tokens)
                times.append(time.perf_counter())
        return times, guide

    def _trim(self) -> None:
        """Drop from the page cache what is beyond the memory; nobody waits for this."""
        from llmaas_plugins.demo.page_cache import drop_pages

        self._kept.trim_page_cache()
        for path in self._side.streamed:
            drop_pages(path)
        held = self._kept.memory_bytes()
        files = sum(path.stat().st_size for path in self._side.folder.rglob("*") if path.is_file())
        self._context_bytes = max(self._context_bytes, held)
        room = max(self._side.beside - held, 0)
        self._cached_bytes = max(self._cached_bytes, min(files, room))


def _keeper(side: Side) -> type[Recompute]:
    """Return how a system keeps the contexts that are not in the engine."""
    from llmaas_plugins.demo.systems import Ours, StateFiles, Unchanged

    if side.keeps_states:
        return StateFiles
    return Ours if side.config and "kv_chunks" in side.config["plugins"] else Unchanged


@contextlib.contextmanager
def _promised(call: Call) -> Iterator[None]:
    from llmaas_plugins import deadlines

    limits = {"ttft": call.first_s, "tpot": call.further_s}
    named = {name: f"{1000 * limit:.3f} ms" for name, limit in limits.items() if limit is not None}
    with deadlines.slo(**named) if named else contextlib.nullcontext():
        yield


class _Guide:
    """Logits processor that leads through a reply. It keeps the logits, to be judged later."""

    def __init__(self, answer: Sequence[int]) -> None:
        self._answer = answer
        self._logits: list[NDArray[np.float32]] = []
        self._led = np.zeros(0, np.float32)

    def __call__(self, _tokens: object, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        if not len(self._led):
            self._led = np.full(len(logits), LOWEST, np.float32)
        elif self._logits:
            self._led[self._answer[len(self._logits) - 1]] = LOWEST
        self._led[self._answer[len(self._logits)]] = HIGHEST
        self._logits.append(np.array(logits, np.float32))
        return self._led

    def predictions(self) -> tuple[list[int], list[float]]:
        """Return the most likely tokens, and the losses of the reply's."""
        best, losses = [], []
        for token, logits in zip(self._answer, self._logits, strict=True):
            most, loss = judged(logits, token)
            best.append(most)
            losses.append(loss)
        return best, losses
