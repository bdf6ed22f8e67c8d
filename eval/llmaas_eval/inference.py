"""Apps that generate and chat, each in its own process, with plugins or with stock llama.cpp.

Two contexts in one process share an allocator and caches. Separate processes share neither, and
each has its own peak memory.
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

from llmaas_eval.internals import finish_writes
from llmaas_plugins.machine import peak_bytes

__all__ = ["App", "Lengths", "Taken"]

_SYSTEM = {"role": "system", "content": "You help with everything."}


class Lengths(NamedTuple):
    """Lengths of an app's prompts and replies.

    Attributes:
        n_prompt: Tokens of a prompt that shares no prefix with earlier ones.
        n_tokens: Tokens generated after that prompt and its first token.
        n_turns: Turns of a conversation, without pauses between them.
        n_question: Tokens of each question.
        n_reply: Most tokens of each reply.
    """

    n_prompt: int = 512
    n_tokens: int = 32
    n_turns: int = 3
    n_question: int = 40
    n_reply: int = 16

    @property
    def n_ctx(self) -> int:
        """Context length in tokens that the work needs."""
        chat = 64 + self.n_turns * (2 * self.n_question + self.n_reply)
        return max(self.n_prompt + self.n_tokens, chat) + 64


class Taken(NamedTuple):
    """Times and output of an app's work.

    Attributes:
        prefill_s: Seconds from the prompt to the first generated token.
        decode_s: Seconds for the tokens after the first.
        chat_s: Seconds for all turns of the conversation.
        tokens: Tokens generated after the prompt.
        n_replied: Tokens of all chat replies. The replies may differ from stock llama.cpp's,
            because the chat template's first tokens are restored from the previous conversation.
    """

    prefill_s: float
    decode_s: float
    chat_s: float
    tokens: list[int]
    n_replied: int


class App(contextlib.AbstractContextManager["App"]):
    """A process with a ``Llama`` on two threads, with flash attention."""

    def __init__(self, model: Path, lengths: Lengths, config: Mapping[str, Any] | None) -> None:
        """Start the process.

        Args:
            model: GGUF file.
            lengths: Lengths of the prompts and replies.
            config: Configuration of the suite; with ``None``, the process runs stock llama.cpp.
        """
        self._lengths = lengths
        self._process = ProcessPoolExecutor(
            1,
            multiprocessing.get_context("spawn"),
            initializer=_open,
            initargs=(str(model), lengths.n_ctx, config),
        )

    def work(self, seed: int) -> Taken:
        """Generate, then chat, with text that depends on ``seed``.

        Before each, wait until the suite has no background work left.
        """
        prefill_s, decode_s, tokens = self._process.submit(_generate, seed, self._lengths).result()
        chat_s, n_replied = self._process.submit(_chat, seed, self._lengths).result()
        return Taken(prefill_s, decode_s, chat_s, tokens, n_replied)

    def peak_bytes(self) -> int:
        """Return the process's peak resident memory in bytes."""
        return self._process.submit(peak_bytes).result()

    def status(self) -> dict[str, Any]:
        """Wait until the suite is idle and return its status; empty without the suite."""
        return self._process.submit(_status).result()

    def __exit__(self, *_: object) -> None:
        """End the process."""
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
    """Wait for the suite's background work, which a real app does while the user reads."""
    if _suite is not None:
        _suite.settle()
        if "kv_chunks" in _suite.hooks.names():
            finish_writes(_suite)


def _random_tokens(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(300, 4000, n).tolist()


def _status() -> dict[str, Any]:
    _idle()
    return {} if _suite is None else dict(_suite.status())


def _close() -> None:
    _stack.close()
