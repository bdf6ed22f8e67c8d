"""One side of a comparison, in a process of its own: vanilla llama.cpp, or the plugins.

Both sides do the same: they read a prompt, and are led through a given answer token by token. That
gives the times of an app's request, and how well each side predicts the answer.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import request_scope
from llmaas_hooks.levels import Levels
from llmaas_plugins.cli.led import HIGHEST, LOWEST, judged, opened, serve_methods
from llmaas_plugins.config import Config
from llmaas_plugins.machine import peak_bytes

__all__ = ["Followed", "Led", "Side", "State", "serve"]


@dataclass(frozen=True, slots=True)
class Side:
    """Settings of a side.

    Attributes:
        model: Path of the GGUF file.
        n_ctx: Context length in tokens.
        config: Configuration of the plugins; None for vanilla.
    """

    model: Path
    n_ctx: int
    config: Config | None


class Led(NamedTuple):
    """Request whose answer is given.

    Attributes:
        prompt: Tokens of the prompt.
        answer: Tokens of the answer.
        level: Level of the request; None asks for none.
        is_new: Whether the engine's cells are dropped before, so that the whole prompt is
            evaluated.
        app: App that the request belongs to.
    """

    prompt: Sequence[int]
    answer: Sequence[int]
    level: float | None = None
    is_new: bool = True
    app: str | None = None


class Followed(NamedTuple):
    """Times and predictions of a request whose answer was given.

    Attributes:
        first_s: Seconds to the first token.
        token_s: Median seconds of a token after the first one.
        losses: Negative log-likelihood of each token of the answer, in nats.
        best: Most likely token in the place of each token of the answer.
    """

    first_s: float
    token_s: float
    losses: NDArray[np.float64]
    best: NDArray[np.int64]


class State(NamedTuple):
    """State of a side.

    Attributes:
        peak_bytes: Peak resident memory of the process.
        plugins: Reports of the plugins by name.
        errors: Errors of the plugins by name.
    """

    peak_bytes: int
    plugins: dict[str, Any]
    errors: dict[str, Any]


def serve(side: Side, pipe: Connection) -> None:
    """Open the model, and answer requests until the pipe is closed.

    A request is the name of a method of ``_Engine``, with its arguments.
    """
    with opened(side.model, side.config, n_ctx=side.n_ctx) as (llama, suite):
        serve_methods(_Engine(llama, suite), pipe)


# -- inside --------------------------------------------------------------------------------------


class _Engine:
    def __init__(self, llama: Any, suite: Any) -> None:
        self._llama, self._suite = llama, suite

    def tokens(self, text: bytes, has_start: bool = False) -> list[int]:
        """Return the tokens of a text; with ``has_start``, as a text begins."""
        found: list[int] = self._llama.tokenize(text, has_start, False)
        return found

    def chat(self, messages: list[dict[str, str]]) -> list[int] | None:
        """Return a conversation's tokens; None if the model's chat template refuses it."""
        from llmaas_plugins.chats.prompts import conversation_tokens

        try:
            return conversation_tokens(self._llama, messages)
        except Exception:
            return None

    def follow(self, led: Led) -> Followed:
        """Read a prompt, and be led through an answer."""
        from llama_cpp import LogitsProcessorList

        guide = _Guide(led.answer)
        if led.is_new:
            self._llama.reset()
        options = {"temp": 0.0, "logits_processor": LogitsProcessorList([guide])}
        with (
            request_scope.serving_context(None, led.app),
            request_scope.at_levels(Levels(led.level, led.level)),
            contextlib.closing(self._llama.generate(led.prompt, **options)) as tokens,
        ):
            times = [_next_s(tokens, guide) for _ in led.answer]
        token_s = float(np.median(times[1:])) if len(times) > 1 else math.nan
        return Followed(times[0], token_s, np.array(guide.losses), np.array(guide.best))

    def state(self) -> State:
        """Return memory and the plugins' reports."""
        if self._suite is None:
            return State(peak_bytes(), {}, {})
        status = self._suite.status()
        return State(peak_bytes(), status["plugins"], status["errors"])


def _next_s(tokens: Iterator[int], guide: _Guide) -> float:
    """Return the seconds of a token, without the guide's own."""
    spent_s, began = guide.spent_s, time.perf_counter()
    next(tokens)
    return time.perf_counter() - began - (guide.spent_s - spent_s)


class _Guide:
    """Logits processor that leads through an answer and notes its predictions."""

    def __init__(self, answer: Sequence[int]) -> None:
        self._answer = iter(answer)
        self.losses: list[float] = []
        self.best: list[int] = []
        self.spent_s = 0.0

    def __call__(self, _tokens: object, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        began = time.perf_counter()
        token = next(self._answer)
        most, loss = judged(logits, token)
        self.losses.append(loss)
        self.best.append(most)
        led = np.full(len(logits), LOWEST, np.float32)
        led[token] = HIGHEST
        self.spent_s += time.perf_counter() - began
        return led
