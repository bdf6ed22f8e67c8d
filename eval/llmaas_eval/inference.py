"""Apps that generate and chat, each in a process of its own: with plugins, or stock llama.cpp.

Two contexts of one process share its allocator and its caches; two processes share nothing, and
each has a peak of memory that is its own.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

__all__ = ["App", "Lengths", "Taken", "peak_bytes"]

_SYSTEM = {"role": "system", "content": "You help with everything."}


class Lengths(NamedTuple):
    """How much an app does.

    Attributes:
        n_prompt: Tokens of a prompt of which nothing is known.
        n_tokens: Generated behind it.
        n_turns: Turns of a conversation, one right after the other.
        n_question: Tokens that each adds.
        n_reply: Most tokens of each reply.
    """

    n_prompt: int = 512
    n_tokens: int = 32
    n_turns: int = 3
    n_question: int = 40
    n_reply: int = 16

    @property
    def n_ctx(self) -> int:
        """Tokens that a context must hold."""
        chat = 64 + self.n_turns * (2 * self.n_question + self.n_reply)
        return max(self.n_prompt + self.n_tokens, chat) + 64


class Taken(NamedTuple):
    """What an app took, and what it said.

    Attributes:
        prefill_s: Seconds to the first token behind the prompt.
        decode_s: Seconds of the tokens behind that.
        chat_s: Seconds of the conversation's turns.
        tokens: What it generated behind the prompt.
        n_replied: Tokens of its replies. They may say something else than stock llama.cpp's: the
            beginning of a chat template is restored from the conversation before.
    """

    prefill_s: float
    decode_s: float
    chat_s: float
    tokens: list[int]
    n_replied: int


class App(contextlib.AbstractContextManager["App"]):
    """A process with a ``Llama`` of two threads, flash attention on."""

    def __init__(self, model: Path, lengths: Lengths, config: Mapping[str, Any] | None) -> None:
        """Start it.

        Args:
            model: GGUF file.
            lengths: How much it does.
            config: Of the suite; without one, the process is stock.
        """
        self._lengths = lengths
        self._process = ProcessPoolExecutor(
            1,
            multiprocessing.get_context("spawn"),
            initializer=_open,
            initargs=(str(model), lengths.n_ctx, config),
        )

    def work(self, seed: int) -> Taken:
        """Generate and chat, with content that depends on ``seed``; idle before each."""
        prefill_s, decode_s, tokens = self._process.submit(_generate, seed, self._lengths).result()
        chat_s, n_replied = self._process.submit(_chat, seed, self._lengths).result()
        return Taken(prefill_s, decode_s, chat_s, tokens, n_replied)

    def peak_bytes(self) -> int:
        """The most memory that the process has had."""
        return self._process.submit(peak_bytes).result()

    def status(self) -> dict[str, Any]:
        """The suite's own report, once it is idle; empty without it."""
        return self._process.submit(_status).result()

    def __exit__(self, *_: object) -> None:
        """End it."""
        self._process.submit(_close).result()
        self._process.shutdown()


# -- in the process -----------------------------------------------------------------------------

_stack = contextlib.ExitStack()
_llama: Any = None
_suite: Any = None


def _open(model: str, n_ctx: int, config: Mapping[str, Any] | None) -> None:
    global _llama, _suite  # noqa: PLW0603  one process has one app
    from llama_cpp import Llama

    if config is not None:
        from llmaas_plugins import activate

        _suite = _stack.enter_context(activate(dict(config)))
    threads = {"n_threads": 2, "n_threads_batch": 2}
    _llama = Llama(model, n_ctx=n_ctx, flash_attn=True, verbose=False, **threads)
    _stack.callback(_llama.close)


def _generate(seed: int, lengths: Lengths) -> tuple[float, float, list[int]]:
    prompt = _random_tokens(seed, lengths.n_prompt)
    _idle()
    started = time.perf_counter()
    generator = _llama.generate(prompt, temp=0.0)
    tokens = [next(generator)]
    first = time.perf_counter()
    tokens += [next(generator) for _ in range(lengths.n_tokens)]
    ended = time.perf_counter()
    generator.close()
    return first - started, ended - first, tokens


def _chat(seed: int, lengths: Lengths) -> tuple[float, int]:
    messages, n_replied = [_SYSTEM], 0
    ids = [_random_tokens(1000 * seed + i, lengths.n_question) for i in range(lengths.n_turns)]
    questions = [_llama.detokenize(each).decode(errors="ignore") for each in ids]
    _idle()
    started = time.perf_counter()
    for question in questions:
        messages.append({"role": "user", "content": question})
        done = _llama.create_chat_completion(messages, max_tokens=lengths.n_reply, temperature=0.0)
        messages.append(done["choices"][0]["message"])
        n_replied += done["usage"]["completion_tokens"]
    return time.perf_counter() - started, n_replied


def _idle() -> None:
    """What is left of the work behind the last reply is done while the user reads."""
    if _suite is not None:
        _suite.settle()
        plugin = _suite.hooks._pm.get_plugin("kv_chunks")
        if plugin is not None:
            plugin._workers.write.submit(int).result()  # behind what is written and read back


def _random_tokens(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(300, 4000, n).tolist()


def peak_bytes() -> int:
    """The most memory that this process has had (RSS).

    Not ``getrusage``: it begins with the peak of the process that started this one.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["VmHWM"].split()[0]) << 10


def _status() -> dict[str, Any]:
    _idle()
    return {} if _suite is None else dict(_suite.status())


def _close() -> None:
    _stack.close()
