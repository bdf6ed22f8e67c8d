"""Run one system in a separate process, to measure its memory and keep vanilla unpatched."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from llmaas_hooks import Tokens
from llmaas_plugins.demo.scenario import Script
from llmaas_plugins.machine import peak_bytes

__all__ = ["PLAIN_TEMPLATE", "CallResult", "Usage", "WorkerSpec", "serve_worker"]

_FULL = "full"


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Settings of a worker process.

    Attributes:
        system: Key of ``SYSTEMS``.
        model: Path of the GGUF file.
        llama: Further arguments of ``Llama``.
        folder: Private directory for the system's files.
        suite: Configuration of the suite; None for vanilla.
        scripts: Script of each context.
        n_new: Most tokens of a reply.
        ram_budget: Bytes of RAM for contexts outside the engine.
    """

    system: str
    model: Path
    llama: dict[str, Any]
    folder: Path
    suite: dict[str, Any] | None
    scripts: tuple[Script, ...]
    n_new: int
    ram_budget: int


@dataclass(frozen=True, slots=True)
class CallResult:
    """Measurements of one call.

    Attributes:
        leave_s: Seconds to save the previous call's context while its caller waited, measured after
            its reply.
        enter_s: Seconds to load this call's context; None if it was in the engine or is new.
        first_token_s: Seconds until the first token, including ``enter_s``.
        decode_s: Seconds from the first token to the last.
        n_decoded: Number of tokens decoded in ``decode_s``.
        background_s: Seconds of work after the reply, for which the caller did not wait.
        n_context: Number of tokens of the context when the call began.
        text: Text of the reply.
    """

    leave_s: float
    enter_s: float | None
    first_token_s: float
    decode_s: float
    n_decoded: int
    background_s: float
    n_context: int
    text: str

    @property
    def switch_s(self) -> float | None:
        """Seconds of the whole switch, leaving and entering; None if there was no switch."""
        return None if self.enter_s is None else self.leave_s + self.enter_s


@dataclass(frozen=True, slots=True)
class Usage:
    """Memory and disk space that a system used over the whole trace, in bytes."""

    peak_rss_bytes: int
    memory_bytes: int
    disk_bytes: int


@dataclass(slots=True)
class _ContextState:
    messages: list[dict[str, str]]
    tokens: Tokens = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    n_calls: int = 0


def serve_worker(spec: WorkerSpec, pipe: Connection) -> None:
    """Serve a worker's pipe until the demo ends.

    The answer to ``(context, turn)`` is a ``CallResult``, or ``"full"``. The answer to None is
    ``Usage``.
    """
    with _suite(spec):
        worker = _Worker(spec)
        pipe.send("ready")
        while (request := pipe.recv()) is not None:
            pipe.send(worker.call(*request))
        pipe.send(worker.usage())


class _Worker:
    def __init__(self, spec: WorkerSpec) -> None:
        from llama_cpp import Llama
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        from llmaas_plugins.demo.systems import SYSTEMS

        self._spec = spec
        self._llama = Llama(str(spec.model), verbose=False, **spec.llama)
        self._render = Jinja2ChatFormatter(
            self._llama.metadata.get("tokenizer.chat_template", PLAIN_TEMPLATE),
            eos_token="",
            bos_token="",
        )
        self._system = SYSTEMS[spec.system](self._llama, spec.folder, spec.ram_budget)
        self._contexts = [
            _ContextState([{"role": "system", "content": s.system}] if s.system else [])
            for s in spec.scripts
        ]
        self._current: int | None = None
        self._leave_s = 0.0
        self._memory_bytes = 0
        newline = self._llama.tokenize(b"\n", add_bos=False)[-1]
        self._ends = {self._llama.token_eos(), newline}

    def call(self, context: int, turn: int) -> CallResult | str:
        state, llama = self._contexts[context], self._llama
        messages = [
            *state.messages,
            {"role": "user", "content": self._spec.scripts[context].turns[turn]},
        ]
        text = self._render(messages=messages).prompt
        prompt = llama.tokenize(text.encode(), special=True)
        if len(prompt) + self._spec.n_new >= llama.n_ctx():
            return _FULL
        started = time.perf_counter()
        switched = context != self._current and len(state.tokens) > 0
        if switched:
            self._system.enter(context, state.tokens, prompt)
        entered = time.perf_counter()
        times, reply, close_s = self._generate(prompt)
        enter_s = self._enter_s(entered - started) if switched else None
        n_before, reply_text = len(state.tokens), self._finish(state, messages, reply)
        finished = time.perf_counter()
        self._system.leave(context, state.tokens)
        left = time.perf_counter()
        self._system.background()
        behind = time.perf_counter()
        self._system.trim_page_cache()
        leave_s, self._leave_s = self._leave_s, close_s + left - finished
        self._current = context
        self._memory_bytes = max(self._memory_bytes, self._system.memory_bytes())
        return CallResult(
            leave_s=leave_s,
            enter_s=enter_s,
            first_token_s=times[0] - started,
            decode_s=times[-1] - times[0],
            n_decoded=len(times) - 1,
            background_s=behind - left,
            n_context=n_before,
            text=reply_text,
        )

    def usage(self) -> Usage:
        files = [path for path in self._spec.folder.rglob("*") if path.is_file()]
        return Usage(
            peak_rss_bytes=peak_bytes(),
            memory_bytes=self._memory_bytes,
            disk_bytes=sum(path.stat().st_blocks * 512 for path in files),
        )

    def _generate(self, prompt: list[int]) -> tuple[list[float], list[int], float]:
        """Return the tokens' times, the tokens, and the seconds to close, when the suite saves."""
        times: list[float] = []
        reply: list[int] = []
        stream = self._llama.generate(prompt, temp=0.0, repeat_penalty=1.0)
        for token in stream:
            times.append(time.perf_counter())
            if token in self._ends or len(reply) >= self._spec.n_new:
                break
            reply.append(token)
        generated = time.perf_counter()
        stream.close()
        return times, reply, time.perf_counter() - generated

    def _finish(
        self, state: _ContextState, messages: list[dict[str, str]], reply: list[int]
    ) -> str:
        text = self._llama.detokenize(reply).decode(errors="replace").strip()
        state.messages = [*messages, {"role": "assistant", "content": text}]
        state.tokens = np.array(self._llama.input_ids[: self._llama.n_tokens], dtype=np.int32)
        return text

    def _enter_s(self, measured: float) -> float:
        from llmaas_plugins.demo.systems import Ours

        if isinstance(self._system, Ours) and self._system.last is not None:
            return self._system.last.prepare_s
        return measured


PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m['role'].capitalize() + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


@contextlib.contextmanager
def _suite(spec: WorkerSpec) -> Iterator[None]:
    if spec.suite is None:
        yield
        return
    from llmaas_plugins.activation import activate

    with activate(spec.suite):
        yield
