"""Calls that are decoded together, on threads that stand for the engine's."""

from __future__ import annotations

import anyio
import pytest

pytest.importorskip("fastapi")

from llmaas_hooks import NO_PROMISE, Limit, Promise
from llmaas_plugins.config import ServiceConfig
from llmaas_plugins.server.admission import Abandoned
from llmaas_plugins.server.calls import Stage
from llmaas_plugins.server.together import Member, Pieces, Together, next_member

PIECE, TOKEN, READY, AWAY, BACK = (
    Member(stage) for stage in (Stage.PIECE, Stage.TOKEN, Stage.READY, Stage.AWAY, Stage.BACK)
)
SOON = Member(Stage.AWAY, is_expected=True)
OVER = Member(Stage.PIECE, is_over=True)


@pytest.mark.parametrize(
    ("members", "may_step", "found"),
    [
        ([], True, None),
        ([PIECE, AWAY], True, None),
        ([TOKEN, PIECE, TOKEN], True, 0),
        ([TOKEN, PIECE, TOKEN], False, None),
        ([TOKEN, BACK, READY, READY], True, 2),
        ([TOKEN, BACK, AWAY], True, 1),
        ([AWAY, TOKEN], True, 1),
        ([SOON, TOKEN], True, None),
        ([SOON, TOKEN, BACK], True, 2),
        ([READY, OVER], True, 1),
        ([Member(Stage.AWAY, is_over=True), TOKEN], True, 1),
        ([Member(Stage.TOKEN, is_over=True), TOKEN], False, 0),
    ],
)
def test_who_is_next(members, may_step, found):
    assert next_member(members, may_step=may_step) == found


def test_pieces_take_as_long_as_a_batch():
    pieces = Pieces()
    pieces.evaluated(64, 0.001)
    assert pieces.n_tokens == 128
    pieces.evaluated(64, 9.0)  # the rest of a prompt, or another call's
    assert pieces.n_tokens == 128
    pieces.evaluated(128, 0.3)
    assert pieces.n_tokens == 64
    pieces.stepped(1.0)  # weights are read from disk, whatever the number of tokens
    for _ in range(4):
        pieces.evaluated(pieces.n_tokens, 1.0)
    assert pieces.n_tokens == 64
    pieces.stepped(2.0)
    for _ in range(8):
        pieces.evaluated(pieces.n_tokens, 1.0)
    assert pieces.n_tokens == 512
    for _ in range(10):
        pieces.evaluated(pieces.n_tokens, 5.0)
    assert pieces.n_tokens == 8


class Engine:
    """Engine that only one call uses at a time.

    Attributes:
        batches: Names of the calls whose tokens each batch had.
    """

    def __init__(self):
        self.batches, self.user, self.fails = [], None, False


class Seat:
    """Seat of a call on such an engine."""

    def __init__(self, engine, name):
        self.engine, self.name = engine, name
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

    def __init__(self, together, engine, name, promise=NO_PROMISE):
        self.together, self.name = together, name
        self.call = together.enter(name, promise)
        self.seat = Seat(engine, name)
        self.n_alone = 0

    async def run(self, n_tokens):
        """Evaluate a prompt in two pieces, and ``n_tokens`` tokens."""
        await self.call.turn.wait()
        try:
            await anyio.to_thread.run_sync(self._work, n_tokens)
        finally:
            self.together.leave(self.call)

    def _work(self, n_tokens):
        for n_left in (200, 100, *[0] * n_tokens):
            self.together.llmaas_turn(n_left, self.seat)
            assert self.together.running is self.call
            self.n_alone += not (n_left or self.seat.is_evaluated)
        self.seat.can_leave = False
        self.seat.engine.user = None


async def until(condition):
    with anyio.fail_after(10):
        while not condition():  # noqa: ASYNC110  threads change it
            await anyio.sleep(0.001)


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


def test_calls_with_promises_keep_the_engine(together, engine):
    async def story():
        first = Caller(together, engine, "a", Promise(Limit(5.0), Limit(5.0)))
        second = Caller(together, engine, "b")
        async with anyio.create_task_group() as group:
            group.start_soon(first.run, 10)
            group.start_soon(second.run, 10)
        assert engine.batches == []

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
