"""Switches between two contexts on one engine, and the logits that follow."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

import llama_cpp
import numpy as np
from llama_cpp import Llama

_RNG = np.random.default_rng(0)
SYSTEM = [1, *_RNG.integers(300, 4000, 69).tolist()]
PROMPT = [*SYSTEM, *_RNG.integers(300, 4000, 30).tolist()]
OTHER = [*SYSTEM, *_RNG.integers(300, 4000, 40).tolist()]
ENDINGS = [_RNG.integers(300, 4000, 20).tolist() for _ in range(2)]
_N_FIRST, _N_THEN = 4, 8


def ask(llama, tokens, n):
    """Return ``n`` greedy tokens and the logits that each was chosen from."""
    generator = llama.generate(tokens, temp=0.0)
    found, rows = [], []
    for _ in range(n):
        found.append(next(generator))
        row = llama_cpp.llama_get_logits_ith(llama.ctx, -1)
        rows.append(np.ctypeslib.as_array(row, shape=(llama.n_vocab(),)).copy())
    generator.close()
    return found, np.array(rows)


@dataclass(frozen=True)
class Conversation:
    """One model with one setting, a growing context, and a second context in between."""

    path: Path
    settings: dict = field(default_factory=dict)

    def open(self):
        settings = {"n_ctx": 256, "seed": 1, "verbose": False, "n_threads": 1, "n_threads_batch": 1}
        return contextlib.closing(Llama(str(self.path), **(settings | self.settings)))

    def vanilla(self):
        """Return vanilla's first answer, and its second answer's logits for each ending, without a
        switch.
        """
        expected = []
        for ending in ENDINGS:
            with self.open() as llama:
                answer, _ = ask(llama, PROMPT, _N_FIRST)
                expected.append(self.second(llama, answer, ending))
        return answer, expected

    def first(self, llama):
        """Return the first answer, then switch the engine to the other context."""
        answer, _ = ask(llama, PROMPT, _N_FIRST)
        ask(llama, OTHER, 2)
        return answer

    def second(self, llama, answer, ending=ENDINGS[0]):
        """Return the second answer's logits; the first answer's last token is not evaluated."""
        return ask(llama, [*PROMPT, *answer[:-1], *ending], _N_THEN)[1]


N_FIRST_CELLS = len(PROMPT) + _N_FIRST - 1
"""Cells of the context after its first answer."""
