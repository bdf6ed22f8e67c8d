"""Taps exist from their subscription to its end, and cost nothing at other times."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from batches import TOKENS
from claiming import Claimer, created, decode, evaluate, loaded, native, vanilla


def test_nothing_is_added_when_nobody_subscribes(native_context):
    ctx, context = native_context
    assert decode(ctx, TOKENS[:20], 0) == 0
    assert context.stats()["taps"] == 0
    with context.density(), context.hidden_states("final_norm") as states:
        assert decode(ctx, TOKENS[20:21], 20) == 0
        during = context.stats()
    assert during["taps"] == 2 + 1
    assert decode(ctx, TOKENS[21:22], 21) == 0
    after = context.stats()
    assert after["taps"] == during["taps"]
    assert after["passed"] == during["passed"] + 1
    assert len(states.take()) == 1


def test_a_subscription_ends_once(native_context):
    ctx, context = native_context
    states, other = context.hidden_states("final_norm"), context.hidden_states("final_norm")
    states.close()
    states.close()
    assert decode(ctx, TOKENS[:20], 0) == 0
    assert len(states.take()) == 0
    assert len(other.take()) == 20


def test_a_context_has_16_taps(native_context):
    _, context = native_context
    taps = [context.density() for _ in range(16)]
    with pytest.raises(RuntimeError, match="16 taps"):
        context.hidden_states("final_norm")
    taps[0].close()
    context.hidden_states("final_norm")


def test_a_freed_context_says_so(family):
    plugin = Claimer()
    with native(plugin=plugin), loaded(family("llama")) as model:
        with created(model) as ctx:
            context = plugin.contexts[0]
            density = context.density()
            assert decode(ctx, TOKENS[:20], 0) == 0
        for use in (context.stats, context.density, lambda: context.level):
            with pytest.raises(ReferenceError):
                use()
        with pytest.raises(ReferenceError):
            context.level = 1
        assert density.read(20)[1].all()  # counted values stay
        density.close()


def test_a_context_outlives_the_suite(family):
    path, plugin = family("llama"), Claimer()
    expected = vanilla(path)
    with contextlib.ExitStack() as stack:
        suite = native(plugin=plugin)
        try:
            ctx = stack.enter_context(created(stack.enter_context(loaded(path))))
            context = plugin.contexts[0]
            states = context.hidden_states("final_norm")
            assert np.array_equal(evaluate(ctx), expected)
            n_rows = len(states.take())
        finally:
            suite.deactivate()
        with pytest.raises(ReferenceError):
            context.stats()
        assert np.array_equal(evaluate(ctx), expected)
        assert n_rows > 0
        assert len(states.take()) == 0
