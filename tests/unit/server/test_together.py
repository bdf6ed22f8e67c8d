"""Calls that are decoded together, on threads that stand for the engine's."""

from __future__ import annotations

import time

import anyio
import pytest

pytest.importorskip("fastapi")

from calling import Caller, Engine, Seat, until

from llmaas_hooks import ContextCreate
from llmaas_plugins.config import ServiceConfig
from llmaas_plugins.server.admission import Abandoned
from llmaas_plugins.server.together import Together


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def together():
    return Together(ServiceConfig(most_together=3))


def test_calls_are_decoded_together(together, engine):
    async def story():
        callers = [Caller(together, engine, name) for name in "abcde"]
        assert together.running is callers[0].call
        async with anyio.create_task_group() as group:
            for caller in callers:
                group.start_soon(caller.run, 30)
        assert together.running is None
        assert together.aside == []
        assert len(together) == 0
        assert max(map(len, engine.batches)) == 3
        assert together.n_batch_tokens == sum(map(len, engine.batches))

    anyio.run(story)


def test_calls_of_two_levels_take_turns(together, engine):
    """A call alone at its level gets as many tokens as the others meanwhile."""

    async def story():
        levels = {"a": 0, "b": 4, "c": 0}
        callers = [Caller(together, engine, name, level=level) for name, level in levels.items()]
        async with anyio.create_task_group() as group:
            for caller in callers:
                group.start_soon(caller.run, 50)
        first = engine.batches.index({"a", "c"})
        assert 29 <= engine.batches[first : first + 60].count({"b"}) <= 31

    anyio.run(story)


def test_a_call_alone_is_not_put_aside(together, engine):
    async def story():
        caller = Caller(together, engine, "a")
        await caller.run(5)
        assert (engine.batches, caller.n_alone) == ([], 5)

    anyio.run(story)


def test_a_batch_that_fails(together, engine):
    engine.fails = True

    async def story():
        callers = [Caller(together, engine, name) for name in "ab"]
        async with anyio.create_task_group() as group:
            for caller in callers:
                group.start_soon(caller.run, 10)
        assert [caller.n_alone for caller in callers] == [10, 10]

    anyio.run(story)


def test_a_call_that_is_over_leaves_the_others(together, engine):
    async def story():
        callers = [Caller(together, engine, name) for name in "abc"]
        ended = []

        async def run(caller, n_tokens):
            try:
                await caller.run(n_tokens)
            except Abandoned:
                caller.seat.engine.user = None
                ended.append(caller.name)

        async with anyio.create_task_group() as group:
            for caller in callers:
                group.start_soon(run, caller, 300)
            await until(lambda: len(engine.batches) > 5)
            callers[1].call.is_over = True
        assert ended == ["b"]
        assert together.running is None
        assert engine.batches[-1] <= {"a", "c"}

    anyio.run(story)


def test_a_call_that_cannot_enter_does_not_wait(together, engine):
    class Failing(Seat):
        def leave(self):
            raise RuntimeError("a plugin failed")

    async def story():
        running = together.enter("a")
        running.seat, running.away_since_s = Failing(engine, "a"), 0.0
        with pytest.raises(RuntimeError, match="a plugin failed"):
            together.enter("b")
        assert together.waiting == []

    anyio.run(story)


def test_why_calls_run_alone(together):
    def why():
        return together.report()["together"]["why_alone"]

    create = ContextCreate(1, None, None)
    assert "kv_chunks does not keep" in why()
    together.llmaas_context_create(create)
    create.n_seats = create.wants_seats
    assert all(check(1) for check in create.checks)
    assert why() is None
    create.n_seats, create.why_no_seats = 0, "another plugin cannot"  # its check comes later
    assert why() == "another plugin cannot"


def test_a_stream_lets_others_in_between_its_pieces(together, engine):
    async def story():
        streaming, other = Caller(together, engine, "a"), Caller(together, engine, "b")
        steps = []

        def pieces():
            for n_left in (200, 100, *[0] * 20):
                together.llmaas_turn(n_left, streaming.seat)
                steps.append(streaming.seat.is_evaluated)
                yield "piece"
            streaming.seat.can_leave = False
            engine.user = None
            return "reply"

        stream = together.shared(streaming.call, pieces(), is_last=True)
        assert await anyio.to_thread.run_sync(next, stream) == "piece"
        async with anyio.create_task_group() as group:
            group.start_soon(other.run, 5)  # ends while the stream's client does not read
            await until(lambda: len(together) == 1)
            third = Caller(together, engine, "c")
            group.start_soon(third.run, 1000)
            found = []
            while (piece := await anyio.to_thread.run_sync(next, stream, None)) is not None:
                found.append(piece)
            assert together.running is not streaming.call  # whose client still gets the end
            together.leave(streaming.call)
        assert len(found) == 21
        assert any(steps)
        assert len(together) == 0

    anyio.run(story)


def test_a_stream_says_how_long_it_waited_to_come_back(together, engine):
    async def story():
        streaming, other = Caller(together, engine, "a"), Caller(together, engine, "b")
        seat = streaming.seat

        def pieces():
            for n_left in (200, 100, 0, 0):
                together.llmaas_turn(n_left, seat)
                if not n_left:
                    yield "piece"
            seat.can_leave = False
            engine.user = None

        stream = together.shared(streaming.call, pieces(), is_last=True)
        await anyio.to_thread.run_sync(next, stream)
        assert seat.waited_s == 0
        other.before_turn = lambda: time.sleep(0.05)
        async with anyio.create_task_group() as group:
            group.start_soon(other.run, 3)
            await until(lambda: seat.is_aside)
            began_s = time.perf_counter()
            await anyio.to_thread.run_sync(next, stream)
            assert 0.02 < seat.waited_s < time.perf_counter() - began_s
            assert await anyio.to_thread.run_sync(next, stream, None) is None
            together.leave(streaming.call)
        assert other.seat.waited_s == 0

    anyio.run(story)


def test_the_end_of_the_service_ends_all(together, engine):
    async def story():
        callers = [Caller(together, engine, name) for name in "abc"]
        ended = []

        async def run(caller):
            try:
                await caller.run(10**6)
            except Abandoned:
                engine.user = None
                ended.append(caller.name)

        async with anyio.create_task_group() as group:
            for caller in callers:
                group.start_soon(run, caller)
            await until(lambda: len(engine.batches) > 3)
            together.stop()
            together.end_running()
        assert sorted(ended) == ["a", "b", "c"]

    anyio.run(story)
