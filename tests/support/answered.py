"""Answers of settings whose risk is known."""

from __future__ import annotations

import dataclasses

import numpy as np

from llmaas_plugins.deadlines.answers import Answers, Shorter

LEVELS = (1.0, 0.8, 0.6, 0.4)
SHARES = (0.7, 0.5)
COARSE = (1.0, 0.6, 0.4)
"""Levels at which shorter prompts were read."""
N_ANSWER = 4


def answers(n=1000, *, seed=0, levels=LEVELS, risk=0.02, prefill_risk=0.02):
    """Return answers that differ more often at narrow levels and small margins.

    Each step of the answer's level adds ``risk`` to the probability: twice as much at a margin of
    0, and nothing at the largest. A step of the prompt's level adds ``prefill_risk``.
    """
    chance = np.random.default_rng(seed)
    margins = chance.uniform(0, 4, n).astype(np.float32)
    steps = np.arange(len(levels))
    by_answer = risk * steps * (2 - margins[:, None] / 2)
    shares = prefill_risk * steps[:, None] + by_answer[:, None, :]
    differ = chance.random((n, 1, 1)) < shares
    leads = np.where(differ, chance.integers(0, N_ANSWER, (n, 1, 1)), N_ANSWER)
    n_prompt = chance.integers(10, 200, n).astype(np.int32)
    return Answers(
        levels, N_ANSWER, n_prompt, leads.astype(np.uint8), np.tile(margins[:, None], len(levels))
    ).check()


def with_shorter(found, *, risk=0.1, seed=1):
    """Return answers with those to shorter prompts.

    These differ as often as the whole prompts' answers, and besides with a probability of ``risk``
    for each step of the share.
    """
    chance = np.random.default_rng(seed)
    places = [found.levels.index(level) for level in COARSE]
    leads = np.tile(found.leads[:, None, places][..., places], (1, len(SHARES), 1, 1))
    steps = 1 + np.arange(len(SHARES))
    leads[chance.random((len(found), 1)) < risk * steps] = 0
    return dataclasses.replace(found, shorter=Shorter(SHARES, COARSE, leads)).check()
