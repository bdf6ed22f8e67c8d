"""Calls with promises, and others that are decoded together with them."""

from __future__ import annotations

import functools
import time

import anyio
import pytest

pytest.importorskip("fastapi")

from calling import Caller, Engine, until

from llmaas_hooks import Limit, Promise
from llmaas_plugins.config import ServiceConfig
from llmaas_plugins.server.admission import Abandoned
from llmaas_plugins.server.calls import Stage
from llmaas_plugins.server.together import Together


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def together():
    return Together(ServiceConfig(most_together=3))


@pytest.mark.parametrize(
    ("promise", "shares"),
    [
        (Promise(Limit(5.0), Limit(5.0)), True),
        (Promise(Limit(5.0), Limit(1e-4)), False),
        (Promise(Limit(5.0)), True),
    ],
)
def test_calls_with_promises_share_batches_that_keep_them(together, engine, promise, shares):
    """A batch of the engine takes 1 ms."""

    async def story():
        first, second = Caller(together, engine, "a", promise), Caller(together, engine, "b")
        async with anyio.create_task_group() as group:
            group.start_soon(first.run, 30)
            group.start_soon(second.run, 30)
        assert ({"a", "b"} in engine.batches) == shares
        assert shares or first.n_alone == 30

    anyio.run(story)


def test_calls_with_promises_share_with_each_other(engine):
    """One that would be late interrupts the others, and they all share once it answers."""
    together = Together(ServiceConfig(most_together=3, longest_overtaken_s=0.2))

    async def story():
        async def run(caller):
            try:
                await caller.run(10**6)
            except Abandoned:
                engine.user = None

        async with anyio.create_task_group() as group:
            for name in "abc":
                caller = Caller(together, engine, name, Promise(Limit(0.2), Limit(5.0)))
                group.start_soon(run, caller)
                await until(lambda caller=caller: caller.call.first_s is not None, together)
            await until(lambda: engine.batches.count({"a", "b", "c"}) > 10, together)
            together.stop()
            together.end_running()
        assert len(together) == 0

    anyio.run(story)


def test_a_call_goes_alone_once_all_have_sampled(together, engine):
    """The results of their batch are lost then."""

    async def story():
        callers = [Caller(together, engine, name) for name in "abc"]

        def hurry(call):
            are_ready = any(one.stage is Stage.READY for one in together.aside)
            call.promise = Promise(tpot=Limit(1e-9 if are_ready else 5.0))

        for caller in callers:
            caller.before_turn = functools.partial(hurry, caller.call)
        async with anyio.create_task_group() as group:
            for caller in callers:
                group.start_soon(caller.run, 100)
        assert sum(caller.n_alone for caller in callers) > 100
        assert max(map(len, engine.batches)) == 3
        assert together.n_alone > 50

    anyio.run(story)


def test_a_call_shares_again_after_some_tokens_alone(together, engine):
    """The time alone is not taken for the time to sample."""

    async def story():
        callers = [Caller(together, engine, name) for name in "ab"]
        hurried = []

        def hurry(caller):
            if caller.call.stage is Stage.READY and not hurried:
                hurried.append(caller)
            if caller in hurried:
                is_alone = caller.n_alone < 30
                caller.call.promise = Promise(tpot=Limit(1e-9 if is_alone else 0.05))
                time.sleep(0.01 * is_alone)

        async def run(caller):
            try:
                await caller.run(10**4)
            except Abandoned:
                engine.user = None

        for caller in callers:
            caller.before_turn = functools.partial(hurry, caller)
        async with anyio.create_task_group() as group:
            for caller in callers:
                group.start_soon(run, caller)
            await until(lambda: hurried and hurried[0].n_alone >= 30, together)
            n_batches = engine.batches.count({"a", "b"})
            await until(lambda: engine.batches.count({"a", "b"}) > n_batches + 10, together)
            n_alone = hurried[0].n_alone
            together.stop()
            together.end_running()
        assert n_alone < 60

    anyio.run(story)


def test_a_call_shares_nothing_while_another_waits_for_its_first_token(together, engine):
    async def story():
        first = Caller(together, engine, "a", Promise(Limit(5.0), Limit(5.0)))
        second = Caller(together, engine, "b")
        async with anyio.create_task_group() as group:
            group.start_soon(first.run, 1000)
            group.start_soon(second.run, 1000)
            await until(lambda: engine.batches.count({"a", "b"}) > 10)
            third = Caller(together, engine, "c", Promise(Limit(60.0)))
            n_before, n_alone = len(engine.batches), first.n_alone
            group.start_soon(third.run, 10)
            await until(lambda: third.call.first_s is not None)
        assert first.n_alone > n_alone + 100
        shared = [batch for batch in engine.batches[n_before:] if {"a", "b"} <= batch]
        assert len(shared) < 10

    anyio.run(story)


@pytest.mark.parametrize(
    ("config", "promise"),
    [({}, Promise(tpot=Limit(5.0))), ({"preempt": False}, Promise(Limit(60.0)))],
    ids=["no promise of the first token", "no interruptions"],
)
def test_calls_share_while_another_waits(engine, config, promise):
    together = Together(ServiceConfig(most_together=3, **config))

    async def story():
        first = Caller(together, engine, "a", Promise(Limit(5.0), Limit(5.0)))
        second = Caller(together, engine, "b")
        async with anyio.create_task_group() as group:
            group.start_soon(first.run, 500)
            group.start_soon(second.run, 500)
            await until(lambda: engine.batches.count({"a", "b"}) > 10)
            third, n_alone = Caller(together, engine, "c", promise), first.n_alone
            await anyio.sleep(0.05)
            group.start_soon(third.run, 10)
            await until(lambda: third.call.first_s is not None)
            assert first.n_alone <= n_alone + 10

    anyio.run(story)


def test_the_rest_of_a_prompt_that_is_overdue_goes_before_promises(engine):
    config = ServiceConfig(most_together=3, longest_overtaken_s=0.01, preempt=False)
    together = Together(config)

    async def story():
        first = Caller(together, engine, "a")
        second = Caller(together, engine, "b", Promise(Limit(60.0)))
        await anyio.sleep(0.02)
        async with anyio.create_task_group() as group:
            group.start_soon(first.run, 10)
            group.start_soon(second.run, 10)
        assert first.call.first_s < second.call.first_s

    anyio.run(story)


def test_a_call_leaves_time_for_promises_of_calls_aside(together, engine):
    async def story():
        async def run(caller):
            try:
                await caller.run(10**6)
            except Abandoned:
                engine.user = None

        promised = Caller(together, engine, "a", Promise(tpot=Limit(5.0)))
        other = Caller(together, engine, "b")
        async with anyio.create_task_group() as group:
            group.start_soon(run, promised)
            group.start_soon(run, other)
            await until(lambda: together.begun(other.call).room_s is not None, together)
            together.stop()
            together.end_running()

    anyio.run(story)
