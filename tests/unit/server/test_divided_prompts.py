"""Prompts of calls, divided so that other calls may go between their pieces."""

from __future__ import annotations

from types import SimpleNamespace

import anyio
import numpy as np
import pytest

pytest.importorskip("fastapi")

from llmaas_hooks import (
    DecodeStep,
    HookManager,
    Levels,
    LevelTimes,
    Limit,
    Promise,
    Request,
    RequestCost,
    hookimpl,
)
from llmaas_plugins.config import ServiceConfig
from llmaas_plugins.server.admission import Admission
from llmaas_plugins.server.together import Together

LATER = Promise(Limit(30.0), Limit(30.0))


def run(story):
    anyio.run(story)


@pytest.mark.parametrize(("token_s", "piece"), [(1.0, 8), (0.001, 65), (0.0004, 129), (1e-6, 450)])
def test_prompts_are_divided_by_the_times_of_former_ones(token_s, piece):
    async def story():
        admission = Admission(ServiceConfig())
        admission.llmaas_prefill(DecodeStep(1, 100, 100 * token_s))
        admission.llmaas_prefill(DecodeStep(1, 2, 50.0))  # too short to tell
        admission.enter("mail", LATER)
        assert admission.llmaas_turn(900) == piece

    run(story)


class Profile:
    """Times of two levels, asked for by the hook."""

    n_asked = 0

    @hookimpl
    def llmaas_cost(self):
        self.n_asked += 1
        slow, fast = (
            LevelTimes(level, lambda n, s=token_s: n * s, lambda _: 0.01)
            for level, token_s in ((1.0, 0.004), (0.2, 0.0005))
        )
        return RequestCost(levels=(slow, fast))


class Planner:
    """Plans a level by the times."""

    def __init__(self, level):
        self.level = level

    @hookimpl
    def llmaas_level(self, cost):
        return Levels(cost().levels and self.level)


@pytest.mark.parametrize(
    ("asked", "planned", "n_ubatch", "piece"),
    [
        (None, None, 512, 24),
        (None, 0.2, 512, 180),
        (None, 0.2, 64, 128),
        (1.0, 0.2, 512, 24),
        (0.2, None, 512, 180),
    ],
)
@pytest.mark.parametrize("kind", [Admission, Together])
def test_a_prompt_is_divided_by_the_times_of_its_level(kind, asked, planned, n_ubatch, piece):
    async def story():
        admission, profile = kind(ServiceConfig()), Profile()
        hooks = HookManager("raise")
        plugins = {"profile": profile, "planner": Planner(planned), "admission": admission}
        for name, plugin in plugins.items():
            hooks.register(name, plugin)
        call = admission.enter("mail", LATER)
        params = SimpleNamespace(n_batch=512, n_ubatch=n_ubatch)
        engine = SimpleNamespace(
            ctx=1,
            llama=SimpleNamespace(context_params=params, n_batch=512),
            n_explained=0,
            resident_app=None,
            resident_tokens=lambda: np.zeros(0, np.int32),
        )
        tokens = np.zeros(720, np.int32)
        request = Request(engine, tokens, None, levels=Levels(asked))
        hooks.request_begin(request, hooks.level(request))
        assert profile.n_asked == 1  # by both plugins together
        assert hooks.turn(request, 720) == piece
        admission.llmaas_prefill(DecodeStep(1, 100, 50.0))  # a busy machine changes no piece
        assert hooks.turn(request, 720 - piece) == piece
        admission.leave(call)
        again = admission.enter("mail", LATER)
        hooks.request_begin(request, hooks.level(request))
        assert hooks.turn(request, 720) == piece  # nor those of the next call
        admission.leave(again)

    run(story)


def test_without_promises_no_times_are_asked_for():
    async def story():
        admission, asked = Admission(ServiceConfig()), []
        admission.enter("mail")
        admission.llmaas_level(lambda: asked.append(1))
        assert not asked

    run(story)
