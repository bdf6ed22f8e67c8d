"""Calls that are decoded together, on threads that stand for the engine's."""

from __future__ import annotations

import anyio
import pytest

pytest.importorskip("fastapi")

from llmaas_hooks import NO_PROMISE, DecodeStep, Limit, Promise
from llmaas_plugins.config import ServiceConfig
from llmaas_plugins.server.admission import Abandoned
from llmaas_plugins.server.together import Together


class Engine:
    """Engine that only one call uses at a time.

    Attributes:
        batches: Names of the calls whose tokens each batch had.
    """

    def __init__(self):
        self.batches, self.user, self.fails = [], None, False


class Seat:
    """Seat of a call on such an engine."""

    def __init__(self, engine, name, level=0):
        self.engine, self.name, self.level = engine, name, level
        self.is_aside, self.can_leave, self.is_evaluated = False, True, False

    def leave(self):
        assert not self.is_aside
        assert self.engine.user in {None, self.name}
        self.is_aside, self.is_evaluated, self.engine.user = True, False, None

    def enter(self):
        assert self.is_aside
        assert self.engine.user is None
        self.is_aside, self.engine.user = False, self.name

    def evaluate_with(self, others):
        seats = [self, *others]
        assert self.engine.user is None
        assert all(seat.is_aside for seat in seats)
        assert {seat.level for seat in seats} == {self.level}
        if self.engine.fails:
            return None
        for seat in seats:
            seat.is_evaluated = True
        self.engine.batches.append(frozenset(seat.name for seat in seats))
        return 0.001


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def together():
    return Together(ServiceConfig(most_together=3))


class Caller:
    """Call that runs in a task, and whose work is done on other threads."""

    def __init__(self, together, engine, name, promise=NO_PROMISE, level=0):
        self.together, self.name = together, name
        self.call = together.enter(name, promise)
        self.seat = Seat(engine, name, level)
        self.n_alone = 0

    async def run(self, n_tokens):
        """Evaluate a prompt in two pieces, and ``n_tokens`` tokens."""
        await self.call.turn.wait()
        try:
            await anyio.to_thread.run_sync(self._work, n_tokens)
        finally:
            self.together.leave(self.call)

    def _work(self, n_tokens):
        engine = self.seat.engine
        for n_left in (200, 100, *[0] * n_tokens):
            engine.user = self.name  # maybe in the place of one that it interrupts
            self.together.llmaas_turn(n_left, self.seat)
            assert self.together.running is self.call
            engine.user = self.name
            if not (n_left or self.seat.is_evaluated):
                self.n_alone += 1
                self.together.end_if_unwanted(DecodeStep(0, 1, 0.001))
            self.seat.is_evaluated = False
        self.seat.can_leave = False
        engine.user = None


async def until(condition, together=None):
    """Wait for a condition; if it does not come, end all calls, whose threads go on otherwise."""
    try:
        with anyio.fail_after(20):
            while not condition():  # noqa: ASYNC110  threads change it
                await anyio.sleep(0.001)
    except TimeoutError:
        if together is not None:
            together.end_running()
        raise


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
