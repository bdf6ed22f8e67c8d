"""Calls that go before others, on threads that stand for the engine's."""

from __future__ import annotations

import threading

import anyio
import numpy as np
import pytest

pytest.importorskip("fastapi")

from llmaas_hooks import ContextCreate, HookManager, Limit, Promise, hookimpl
from llmaas_plugins.config import ServiceConfig
from llmaas_plugins.server.admission import Abandoned, Admission
from llmaas_plugins.server.together import Together

SOON = Promise(Limit(0.5))
LATER = Promise(Limit(30.0), Limit(30.0))
LONG = LATER.over(Promise(n_most=64))
FIRST_S = 0.3
"""Time to the first token of apps whose calls are known."""


@pytest.fixture
def admit():
    """Return an admission that knows how long calls of these apps take."""

    def make(**config):
        admission = Admission(ServiceConfig(**config))
        for app in ("mail", "keyboard"):
            for _ in range(20):
                admission._estimates.called(app, FIRST_S, 0.02, {})
        return admission

    return make


async def take_turn(admission, n_left=0):
    """Take a turn on another thread; return its result, or the exception that ended it."""
    try:
        return await anyio.to_thread.run_sync(admission.llmaas_turn, n_left)
    except Abandoned as error:
        return error


async def until(condition):
    with anyio.fail_after(10):
        while not condition():  # noqa: ASYNC110  threads change it
            await anyio.sleep(0.001)


def run(story):
    anyio.run(story)


def test_without_promises_nothing_is_divided_or_interrupted(admit):
    async def story():
        admission = admit()
        calls = [admission.enter(app) for app in ("mail", "keyboard")]
        assert await take_turn(admission, 900) is None
        admission.leave(calls[0])
        assert admission.running is calls[1]

    run(story)


def test_calls_with_promises_go_before_others(admit):
    async def story():
        admission = admit()
        first, plain, later, soon = (
            admission.enter("mail", promise) for promise in (LATER, Promise(), LATER, SOON)
        )
        for running, behind in ((first, soon), (soon, plain), (plain, later)):
            admission.leave(running)
            assert admission.running is behind

    run(story)


def test_a_call_that_is_late_in_any_case_holds_up_nobody(admit):
    async def story():
        admission = admit()
        first = admission.enter("mail", LATER)
        hopeless = admission.enter("mail", Promise(Limit(FIRST_S / 2)))
        possible = admission.enter("mail", Promise(Limit(5.0)))
        admission.leave(first)
        assert admission.running is possible
        admission.leave(possible)
        assert admission.running is hopeless

    run(story)


def test_a_call_that_cannot_wait_interrupts_one_that_can(admit):
    async def story():
        admission = admit()
        running = admission.enter("mail", LONG)
        results = []

        async def go_on():
            results.append(await take_turn(admission, 0))

        async with anyio.create_task_group() as group:
            assert await take_turn(admission, 900) == 450
            tight = admission.enter("keyboard", SOON)
            assert admission.running is running
            group.start_soon(go_on)
            await until(lambda: admission.running is tight)
            assert admission.interrupted == [running]
            await tight.turn.wait()
            assert not results
            admission.leave(tight)
            await until(lambda: results)
        assert admission.running is running
        assert (results, admission.interrupted, admission.n_interruptions) == ([450], [], 1)

    run(story)


@pytest.mark.parametrize("config", [{"preempt": False}, {"schedule": "fifo"}])
def test_interruptions_can_be_turned_off(admit, config):
    async def story():
        admission = admit(**config)
        running = admission.enter("mail", LATER)
        admission.enter("keyboard", SOON)
        await take_turn(admission, 0)
        assert admission.running is running

    run(story)


@pytest.mark.parametrize("kind", [Admission, Together])
@pytest.mark.parametrize(
    ("config", "expected"), [({}, True), ({"preempt": False}, False), ({"schedule": "fifo"}, False)]
)
def test_plugins_are_told_whether_requests_may_be_interrupted(kind, config, expected):
    told = []

    class Cells:
        @hookimpl
        def llmaas_context_create(self, create):
            told.append(create.takes_turns)

    hooks = HookManager("raise")
    hooks.register("cells", Cells())
    hooks.register("admission", kind(ServiceConfig(**config)))
    hooks.context_create(ContextCreate(1, None, takes_turns=True))
    assert told == [expected]


def test_fifo_is_the_order_of_arrival(admit):
    async def story():
        admission = admit(schedule="fifo")
        calls = [admission.enter("mail", one) for one in (Promise(), LATER, SOON)]
        for call in calls:
            assert admission.running is call
            assert await take_turn(admission, 900) is None
            admission.leave(call)

    run(story)


def test_nothing_overtakes_a_call_that_was_overtaken_for_too_long(admit):
    """The bound against starvation: after it, only calls that were there before go first."""

    async def story():
        admission = admit(longest_overtaken_s=0.05)
        running = admission.enter("mail", LATER)
        plain = admission.enter("mail")
        await anyio.sleep(0.06)
        tight = [admission.enter("keyboard", SOON) for _ in range(4)]
        admission.leave(running)
        assert admission.running is plain
        await take_turn(admission, 900)
        assert admission.running is plain  # it is not interrupted any more
        admission.leave(plain)
        assert admission.running is tight[0]

    run(story)


def test_calls_in_one_context_keep_their_order(admit):
    async def story():
        admission = admit()
        running = admission.enter("mail", LONG, context="a")
        same = admission.enter("keyboard", SOON, context="a")
        await take_turn(admission, 0)
        assert admission.running is running  # not interrupted for a later turn of its own context
        first, second = (admission.enter("mail", one, context="b") for one in (LATER, SOON))
        admission.leave(running)
        assert admission.running is same
        admission.leave(same)
        assert admission.running is first
        admission.leave(first)
        assert admission.running is second

    run(story)


def test_an_interrupted_call_whose_client_left_ends_next(admit):
    async def story():
        admission = admit()
        running = admission.enter("mail", LONG)
        tight = admission.enter("keyboard", SOON)
        results = []

        async def go_on():
            results.append(await take_turn(admission, 0))

        async with anyio.create_task_group() as group:
            group.start_soon(go_on)
            await until(lambda: admission.running is tight)
            running.end()
            last = threading.Thread(target=admission.llmaas_turn, args=(0,))
            last.start()  # the tight call waits until the other has ended
            await until(lambda: results)
            assert isinstance(results[0], Abandoned)
            assert admission.running is running
            admission.leave(running)
            await until(lambda: not last.is_alive())
            assert admission.running is tight

    run(story)


def test_stopping_ends_interrupted_calls(admit):
    async def story():
        admission = admit()
        running = admission.enter("mail", LONG)
        tight = admission.enter("keyboard", SOON)
        results = []

        async def go_on():
            results.append(await take_turn(admission, 0))

        async with anyio.create_task_group() as group:
            group.start_soon(go_on)
            await until(lambda: admission.running is tight)
            assert len(admission) == 2
            admission.stop()
            admission.end_running()
            assert running.refusal.status == tight.refusal.status == 503
            admission.leave(tight)
            await until(lambda: results)
            assert isinstance(results[0], Abandoned)
            admission.leave(running)
        assert len(admission) == 0

    run(story)


def test_room_is_left_for_those_behind(admit):
    async def story():
        admission = admit()
        running = admission.enter("mail", LATER)
        assert admission.begun(running).room_s is None
        admission.enter("keyboard", SOON)
        room = admission.begun(running).room_s
        assert 0 < room < SOON.ttft.value - 0.9 * FIRST_S

    run(story)


def test_room_is_left_for_an_interrupted_call(admit):
    async def story():
        admission = admit()
        running = admission.enter("mail", Promise(Limit(1.5)))
        async with anyio.create_task_group() as group:
            assert await take_turn(admission, 900) == 450
            tight = admission.enter("keyboard", SOON)
            group.start_soon(take_turn, admission, 400)
            await until(lambda: admission.running is tight)
            room = admission.begun(tight).room_s
            assert 0 < room < 1.5 - FIRST_S / 2
            admission.leave(tight)
            await until(lambda: admission.running is running)

    run(story)


def test_shares_stand_for_the_time_of_the_app_s_last_call(admit):
    async def story():
        admission = admit()
        share = Promise(Limit.of("20 %"))
        first = admission.enter("mail", share)
        assert admission._estimates.limit_s("mail", "ttft", share.ttft) == 0.2  # of a second
        notes = {"ttft": {"promised": "20 %", "promised_ms": 70.0}, "tpot": None}
        admission.leave(first, notes)
        assert admission._estimates.limit_s("mail", "ttft", share.ttft) == pytest.approx(0.07)

    run(story)


def test_pressure_follows_the_shares_of_promises_that_others_use(admit):
    estimates = admit()._estimates
    notes = {"ttft": {"promised_ms": 200.0}, "tpot": {"promised_ms": 10.0}}
    none = {"ttft": 0.0, "tpot": 0.0}
    estimates.judge(notes, none)
    estimates.judge({"ttft": None, "tpot": {"promised_ms": None}}, {"ttft": 1.0, "tpot": 1.0})
    assert estimates.pressure == 0
    estimates.judge(notes, none | {"ttft": 0.03})
    assert estimates.pressure == pytest.approx(0.2)
    estimates.judge(notes, none | {"ttft": 0.03})  # 15 % of the limit
    assert estimates.pressure == pytest.approx(0.195)
    for _ in range(19):
        estimates.judge(notes, none)
    estimates.judge(notes, none | {"tpot": 0.002})  # 20 %
    assert estimates.pressure == pytest.approx(0.3)
    for _ in range(99):
        estimates.judge(notes, none | {"tpot": 1.0})
    assert estimates.pressure == 0.95


def test_calls_that_meet_first_assume_half(admit):
    async def story():
        admission = admit()
        alone = admission.enter("mail", SOON)
        admission.leave(alone)
        assert admission.pressure == 0
        admission.enter("mail", SOON)
        admission.enter("keyboard", SOON)
        assert admission.pressure == 0.5
        admission._estimates.judge({"ttft": {"promised_ms": 200.0}}, {"ttft": 0.0})
        admission.enter("keyboard", SOON)
        assert admission.pressure == pytest.approx(0.495)

    run(story)


def test_calls_without_promises_make_no_pressure(admit):
    async def story():
        admission = admit()
        admission.enter("mail")
        admission.enter("keyboard")
        assert admission.pressure == 0

    run(story)


def test_pressure_is_a_quantile(admit):
    estimates = admit()._estimates
    chance = np.random.default_rng(0)
    shares = chance.uniform(0, 0.5, 8000)
    found = []
    for share in shares:
        estimates.judge({"ttft": {"promised_ms": 1000.0}}, {"ttft": share})
        found.append(estimates.pressure)
    assert np.mean(shares[1000:] > found[999:-1]) == pytest.approx(1 / 41, abs=0.005)
