"""Requests whose level changes, and the time from that to their next decode (Fig 16b)."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from llama_cpp import Llama

from llmaas_eval.elastic.timing import DEPTH
from llmaas_hooks import DecodeStep, hookimpl
from llmaas_plugins import activate, elastic

__all__ = ["Request", "Switches"]


class Request(NamedTuple):
    """Times of a request.

    Attributes:
        before_s: Seconds from just before the level is set to the start of the decode.
        decode_s: Seconds of the decode.
    """

    before_s: float
    decode_s: float


class Switches:
    """An app that changes the level of its requests and records the time until the decode."""

    def __init__(self, stack: contextlib.ExitStack, model: Path, depth: int = DEPTH) -> None:
        """Open a prepared model until the stack is closed.

        Args:
            stack: Stack that closes the model and ends the activation.
            model: GGUF file.
            depth: Tokens of each request's prompt.
        """
        config = {"on_error": "raise", "plugins": {"elastic": {}}}
        stack.enter_context(activate(config, {"bench": self}))
        llama = Llama(
            str(model),
            n_ctx=2 * depth,
            n_threads=2,
            n_threads_batch=2,
            flash_attn=True,
            verbose=False,
        )
        self._llama = stack.enter_context(contextlib.closing(llama))
        self._tokens = np.random.default_rng(0).integers(3, llama.n_vocab() - 1, depth).tolist()
        self._decode_s, self._started = 0.0, 0.0
        self.request(1.0)

    @hookimpl
    def llmaas_decode(self, step: DecodeStep) -> None:
        """Note when the decode began, and how long it took."""
        self._decode_s, self._started = step.seconds, time.perf_counter() - step.seconds

    def request(self, level: float) -> Request:
        """Run a request of which all but the last token is already in the context."""
        self._tokens[-1] ^= 1  # ``Llama`` does not evaluate the same prompt again
        before = time.perf_counter()
        with elastic.level(level):
            generator = self._llama.generate(self._tokens, temp=0.0)
            next(generator)
            generator.close()
        return Request(self._started - before, self._decode_s)
