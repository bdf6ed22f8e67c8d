"""Drafts of a model's levels on held-out text, and how many of their tokens are right."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import Drafter, Guess, Request, hookimpl
from llmaas_plugins.elastic.drafting import MOST
from llmaas_plugins.elastic.levels import level_index
from llmaas_plugins.elastic.metadata import read_elastic

__all__ = ["Trace", "accepted_by_place", "traces_of"]

Trace = tuple[int, list[float]]
"""How many of a draft's tokens are right, and the probability that the level gave each token."""


def traces_of(
    prepared: Path, prompts: Sequence[Sequence[int]], shares: Sequence[float], n_said: int
) -> dict[str, list[Trace]]:
    """Return the drafts of levels at every token that the whole model says after prompts.

    The cells before each draft are the whole model's, as in the product.

    Args:
        prepared: Prepared model, which fits into memory.
        prompts: Beginnings of held-out texts.
        shares: Levels.
        n_said: Tokens that the whole model says after each prompt, greedily.
    """
    from llama_cpp import Llama

    from llmaas_plugins import activate

    found = read_elastic(prepared)
    if found is None:
        raise ValueError(f"{prepared} has no levels; `llmaas elastic prepare` writes such a file")
    tracer = _Tracer({share: level_index(found.levels, share) for share in shares})
    config = {"on_error": "raise", "plugins": {"elastic": {"drafts": False}}}
    n_ctx = max(map(len, prompts)) + n_said + MOST + 1
    with (
        activate(config, {"tracer": tracer}),
        contextlib.closing(Llama(str(prepared), n_ctx=n_ctx, verbose=False)) as llama,
    ):
        for prompt in prompts:
            tracer.begin()
            with contextlib.closing(llama.generate(list(prompt), temp=0.0)) as generator:
                said = [token for _, token in zip(range(n_said + MOST), generator, strict=False)]
            tracer.judge(len(prompt), said)
    return {str(share): traces for share, traces in tracer.traces.items()}


def accepted_by_place(traces: Sequence[Trace]) -> list[float]:
    """Return the share of drafts whose first 1, 2, … tokens are all right."""
    n_right = np.array([n for n, _ in traces])
    return [float((n_right > place).mean()) for place in range(MOST)]


class _Tracer:
    """Plugin that lets levels draft at every token, and proposes nothing."""

    most = MOST

    def __init__(self, levels: Mapping[float, int]) -> None:
        self._levels = levels
        self.traces: dict[float, list[Trace]] = {share: [] for share in levels}
        self._drafts: list[tuple[float, int, list[int], list[float]]] = []
        self._guess: Guess | None = None

    @hookimpl
    def llmaas_draft(self, request: Request, guess: Guess) -> Drafter | None:
        """Draft in this request."""
        del request
        self._guess = guess
        return self

    def begin(self) -> None:
        """Forget the drafts of the prompt before."""
        self._drafts.clear()

    def propose(self, tokens: NDArray[Any], seconds: Mapping[int, float]) -> None:
        """Let every level draft."""
        del seconds
        assert self._guess is not None
        for share, level in self._levels.items():
            owns: list[float] = []

            def pick(logits: NDArray[np.float32], owns: list[float] = owns) -> tuple[int, bool]:
                token = int(logits.argmax())
                owns.append(float(1 / np.exp(logits - logits[token]).sum()))
                return token, True

            drafted = self._guess(level, MOST, pick)
            self._drafts.append((share, len(tokens), drafted, owns))

    def judge(self, n_prompt: int, said: Sequence[int]) -> None:
        """Compare the drafts with what was said after a prompt of ``n_prompt`` tokens."""
        for share, n_before, drafted, owns in self._drafts:
            right = said[n_before - n_prompt :][: len(drafted)]
            if len(right) == MOST:
                pairs = zip(drafted, right, strict=True)
                n_right = next((i for i, (a, b) in enumerate(pairs) if a != b), MOST)
                self.traces[share].append((n_right, owns))
