"""Calls of a server that are decoded together, on threads that stand for the engine's."""

from __future__ import annotations

import anyio

from llmaas_hooks import NO_PROMISE, DecodeStep


class Engine:
    """Engine that only one call uses at a time.

    Attributes:
        batches: Names of the calls whose tokens each batch had.
        last: Names of those of the last evaluation, which alone can sample.
    """

    def __init__(self):
        self.batches, self.last, self.user, self.fails = [], frozenset(), None, False


class Seat:
    """Seat of a call on such an engine."""

    def __init__(self, engine, name, level=0):
        self.engine, self.name, self.level = engine, name, level
        self.is_aside, self.can_leave, self.is_evaluated = False, True, False
        self.waited_s = 0.0

    def leave(self):
        assert not self.is_aside
        assert self.engine.user in {None, self.name}
        self.is_aside, self.is_evaluated, self.engine.user = True, False, None

    def enter(self, waited_s=0.0):
        assert self.is_aside
        assert self.engine.user is None
        self.is_aside, self.engine.user = False, self.name
        self.waited_s += waited_s

    def evaluate_with(self, others):
        seats = [self, *others]
        assert self.engine.user is None
        assert all(seat.is_aside for seat in seats)
        assert {seat.level for seat in seats} == {self.level}
        if self.engine.fails:
            return None
        for seat in seats:
            seat.is_evaluated = True
        self.engine.last = frozenset(seat.name for seat in seats)
        self.engine.batches.append(self.engine.last)
        return 0.001


class Caller:
    """Call that runs in a task, and whose work is done on other threads.

    Attributes:
        n_alone: Number of its tokens that it evaluated itself.
        before_turn: Function that is called before each turn.
    """

    def __init__(self, together, engine, name, promise=NO_PROMISE, level=0):
        self.together, self.name = together, name
        self.call = together.enter(name, promise)
        self.seat = Seat(engine, name, level)
        self.n_alone, self.before_turn = 0, lambda: None

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
            self.before_turn()
            self.together.llmaas_turn(n_left, self.seat)
            assert self.together.running is self.call
            engine.user = self.name
            if not self.seat.is_evaluated:
                engine.last = {self.name}
            if not (n_left or self.seat.is_evaluated):
                self.n_alone += 1
                self.together.end_if_unwanted(DecodeStep(0, 1, 0.001))
            assert self.name in engine.last
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
