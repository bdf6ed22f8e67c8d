"""Requests that lie aside go on at their own levels; only equal levels share a batch."""

from __future__ import annotations

import pytest
from paired import Pair

from llmaas_hooks import Levels, hookimpl

N = 12


class Leveled(Pair):
    """Pair of requests with levels of their own, by app."""

    def __init__(self, **levels):
        super().__init__()
        self.levels = levels

    @hookimpl
    def llmaas_level(self, request):
        return self.levels[request.app]


MIXED = {
    "whole and narrow": (Levels(1.0, 1.0), Levels(0.5, 0.5)),
    "other prompts": (Levels(1.0, 0.5), Levels(0.4, 0.5)),
    "other answers": (Levels(0.6, 0.6), Levels(0.6, 0.3)),
    "chosen at the first token": (
        Levels(0.5, 1.0, at_first_token=lambda _logits: 0.7),
        Levels(1.0, 0.7),
    ),
}


@pytest.mark.parametrize("levels", MIXED.values(), ids=MIXED)
def test_logits_are_those_of_requests_alone(engine, narrowing, levels):
    pair = Leveled(a=levels[0], b=levels[1])
    narrowing(pair)
    pair.llama = engine(n_ubatch=1)
    pair.check(N)
    decode = [0.7 if one.at_first_token else one.decode for one in levels]
    assert pair.n_batches == (N - 2 if decode[0] == decode[1] else 0)
    assert pair.n_batches or pair.n_alone == N - 2
