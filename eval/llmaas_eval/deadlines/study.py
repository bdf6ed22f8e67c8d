"""Requests of six apps with the promises of ElastiLM's Table 3, one at a time.

Prompts are pieces of packaged conversations. A cold prompt has no cells; of a warm one, all but the
question is there already, as an app's system prompt is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from llama_cpp import Llama

from llmaas_hooks import request_scope
from llmaas_plugins.activation import activate
from llmaas_plugins.cli.given_text import packaged_conversations
from llmaas_plugins.deadlines import slo
from llmaas_plugins.model.digest import file_digest

__all__ = ["APPS", "FASTEST", "KINDS", "Sample", "Setting", "measure"]

APPS = {
    "Rewind": ("100 %", "100 %"),
    "GMail": ("80 %", "90 %"),
    "Octopus": ("60 %", "80 %"),
    "Shortcuts": ("40 %", "70 %"),
    "Gboard": ("20 %", "60 %"),
    "XiaoAi": ("20 %", "50 %"),
}
"""Time to the first token and of each further one, as shares of the whole model's (Table 3)."""
FASTEST = "fastest setting"
"""Requests that nothing can serve in time, so that they show the fastest setting's times."""
KINDS = ("cold", "warm")


@dataclass(frozen=True, slots=True)
class Setting:
    """Requests to make.

    Attributes:
        n_requests: Requests of each app and kind.
        n_prompt: Tokens of a prompt.
        n_question: Last tokens of the prompt, which are new in each request.
        n_answer: Tokens of an answer.
        scorer: Scorer of words, if requests may read shorter prompts; else None.
    """

    n_requests: int
    n_prompt: int = 200
    n_question: int = 25
    n_answer: int = 16
    scorer: str | None = None


class Sample(NamedTuple):
    """One phase of one request.

    Attributes:
        app: Name of the app.
        kind: One of ``KINDS``.
        phase: ``ttft`` or ``tpot``.
        promised_ms: Promised time.
        expected_ms: Time that the plan expected.
        measured_ms: Measured time.
        level: Level that was used.
        is_feasible: Whether the plan said that the promise will be kept.
        share: Share of the prompt's tokens that was read.
    """

    app: str
    kind: str
    phase: str
    promised_ms: float
    expected_ms: float
    measured_ms: float
    level: float
    is_feasible: bool
    share: float = 1.0


def measure(model: Path, setting: Setting, progress: Callable[[], object]) -> list[Sample]:
    """Serve all requests, apps and kinds in turn.

    Args:
        model: Prepared model whose times were measured.
        setting: Requests to make.
        progress: Called after each request.
    """
    file_digest(model)  # times are found by it, and requests do not wait until it is known
    chance = np.random.default_rng(0)
    apps = {FASTEST: ("1 %", "1 %"), **APPS}
    n_ctx = setting.n_prompt + setting.n_answer + 8
    plugins: dict[str, Any] = {"elastic": {}, "deadlines": {}}
    if setting.scorer is not None:
        plugins["short_prompts"] = {"scorer": setting.scorer, "least_tokens": 2}
    samples: list[Sample] = []
    with (
        activate({"on_error": "raise", "plugins": plugins}),
        contextlib.closing(Llama(str(model), n_ctx=n_ctx, verbose=False)) as llama,
    ):
        text = _text(llama)

        def piece(n_tokens: int) -> list[int]:
            begin = int(chance.integers(len(text) - n_tokens))
            return text[begin : begin + n_tokens]

        n_system = setting.n_prompt - setting.n_question
        system = piece(n_system)
        for _ in range(setting.n_requests):
            for app in chance.permutation(list(apps)):
                for kind in KINDS:
                    if kind == "cold":
                        system = piece(n_system)
                    prompt = system + piece(setting.n_question)
                    notes = _served(llama, prompt, apps[app], setting.n_answer)
                    samples += _samples(str(app), kind, notes)
                    progress()
    return samples


# -- inside --------------------------------------------------------------------------------------


def _text(llama: Llama) -> list[int]:
    """Return the tokens of packaged conversations."""
    talks = "\n".join(packaged_conversations())
    found: list[int] = llama.tokenize(talks.encode(), add_bos=False)
    return found


def _served(
    llama: Llama, prompt: list[int], promise: tuple[str, str], n_answer: int
) -> dict[str, Any]:
    """Serve a request; return the report of its promise."""
    with request_scope.noting() as notes, slo(*promise):
        tokens = llama.generate(prompt, temp=0.0)
        for _ in range(n_answer):
            next(tokens)
        tokens.close()
    read = notes.get("short_prompts", {"tokens": 1, "tokens_read": 1})
    return {**notes["deadlines"], "read": read["tokens_read"] / read["tokens"]}


def _samples(app: str, kind: str, notes: dict[str, Any]) -> Iterator[Sample]:
    for phase in ("ttft", "tpot"):
        found = notes[phase]
        yield Sample(
            app,
            kind,
            phase,
            promised_ms=found["promised_ms"],
            expected_ms=found["expected_ms"],
            measured_ms=found["measured_ms"],
            level=found["level"],
            is_feasible=phase not in notes["infeasible"],
            share=notes["read"],
        )
