"""One system in a process of its own, so that its memory is its own and vanilla is unpatched."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from llmaas_hooks import Tokens
from llmaas_plugins.demo.scenario import Script

__all__ = ["CallResult", "Usage", "WorkerSpec", "serve_worker"]

_FULL = "full"


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """How to set a worker up.

    Attributes:
        system: Key of ``SYSTEMS``.
        model: GGUF file.
        llama: Further arguments of ``Llama``.
        folder: Private directory for its files.
        suite: Configuration to activate, or None for vanilla.
        scripts: One a context.
        n_new: Most tokens of a reply.
        ram_budget: Bytes of RAM for contexts that are not in the engine.
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
        switch_s: Until the context's cells were there; None when it was in the engine already.
        first_token_s: Until the first token, switching included.
        decode_s: From the first token to the last.
        n_decoded: Tokens in ``decode_s``.
        save_s: Keeping the context afterwards, on the caller's path.
        background_s: Work the caller did not wait for.
        n_context: Tokens in the cells when the call began.
        text: The reply.
    """

    switch_s: float | None
    first_token_s: float
    decode_s: float
    n_decoded: int
    save_s: float
    background_s: float
    n_context: int
    text: str


@dataclass(frozen=True, slots=True)
class Usage:
    """What a system used over the whole trace, in bytes."""

    peak_rss_bytes: int
    memory_bytes: int
    disk_bytes: int


@dataclass(slots=True)
class _ContextState:
    messages: list[dict[str, str]]
    tokens: Tokens = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    n_calls: int = 0


def serve_worker(spec: WorkerSpec, pipe: Connection) -> None:
    """Answer ``(context, turn)`` with a ``CallResult`` or ``"full"``, and None with ``Usage``."""
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
            self._llama.metadata.get("tokenizer.chat_template", _PLAIN_TEMPLATE),
            eos_token="",
            bos_token="",
        )
        self._system = SYSTEMS[spec.system](self._llama, spec.folder, spec.ram_budget)
        self._contexts = [
            _ContextState([{"role": "system", "content": s.system}] if s.system else [])
            for s in spec.scripts
        ]
        self._current: int | None = None
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
        times, reply = self._generate(prompt)
        finished = time.perf_counter()
        result = self._finish(context, state, messages, reply)
        left = time.perf_counter()
        self._system.background()
        behind = time.perf_counter()
        self._system.trim_page_cache()
        return CallResult(
            switch_s=self._switch_s(entered - started) if switched else None,
            first_token_s=times[0] - started,
            decode_s=times[-1] - times[0],
            n_decoded=len(times) - 1,
            save_s=left - finished,
            background_s=behind - left,
            n_context=result[0],
            text=result[1],
        )

    def usage(self) -> Usage:
        files = [path for path in self._spec.folder.rglob("*") if path.is_file()]
        return Usage(
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            memory_bytes=self._memory_bytes,
            disk_bytes=sum(path.stat().st_blocks * 512 for path in files),
        )

    def _generate(self, prompt: list[int]) -> tuple[list[float], list[int]]:
        times: list[float] = []
        reply: list[int] = []
        stream = self._llama.generate(prompt, temp=0.0, repeat_penalty=1.0)
        with contextlib.closing(stream):
            for token in stream:
                times.append(time.perf_counter())
                if token in self._ends or len(reply) >= self._spec.n_new:
                    break
                reply.append(token)
        return times, reply

    def _finish(
        self, context: int, state: _ContextState, messages: list[dict[str, str]], reply: list[int]
    ) -> tuple[int, str]:
        n_before = len(state.tokens)
        text = self._llama.detokenize(reply).decode(errors="replace").strip()
        state.messages = [*messages, {"role": "assistant", "content": text}]
        state.tokens = np.array(self._llama._input_ids, dtype=np.int32)
        self._system.leave(context, state.tokens)
        self._current = context
        self._memory_bytes = max(self._memory_bytes, self._system.memory_bytes())
        return n_before, text

    def _switch_s(self, measured: float) -> float:
        from llmaas_plugins.demo.systems import Ours

        if isinstance(self._system, Ours) and self._system.last is not None:
            return self._system.last.prepare_s
        return measured


_PLAIN_TEMPLATE = (
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
