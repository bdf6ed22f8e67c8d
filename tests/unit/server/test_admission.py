"""The queue before the engine: order, bound, fairness, and reasons to end a call."""

from __future__ import annotations

from types import SimpleNamespace

import anyio
import pytest

pytest.importorskip("fastapi")

from llmaas_hooks import NO_PROMISE, DecodeStep, Limit, Promise
from llmaas_plugins.config import ServiceConfig
from llmaas_plugins.server.admission import Abandoned, Admission
from llmaas_plugins.server.prompt_pieces import MOST_PIECE
from llmaas_plugins.server.refusal import Refusal
from llmaas_plugins.server.together import Together


@pytest.fixture
def in_loop():
    """Run a coroutine function on an event loop."""
    return anyio.run


STEP = DecodeStep(1, 1, 0.01)


def names(calls):
    return [call.app for call in calls]


def test_one_runs_and_the_others_follow_in_order(in_loop):
    async def story():
        admission = Admission(ServiceConfig(max_queue=3))
        calls = [admission.enter("mail") for _ in range(4)]
        for i, call in enumerate(calls):
            assert admission.running is call
            assert [c.turn.is_set() for c in calls] == [j <= i for j in range(4)]
            assert len(admission) == 4 - i
            admission.leave(call)
        assert len(admission) == 0

    in_loop(story)


def test_one_more_than_may_wait_is_refused(in_loop):
    async def story():
        admission = Admission(ServiceConfig(max_queue=2))
        calls = [admission.enter("mail") for _ in range(3)]
        for attempt in (admission.check, admission.enter):
            with pytest.raises(Refusal, match=r"2 calls are waiting.*the limit is 2") as caught:
                attempt("mail")
            assert caught.value.status == 429
            assert (b"retry-after", b"1") in caught.value.headers
        assert not any(call.is_over for call in calls)
        admission.leave(calls[2])  # gives up waiting
        admission.check("mail")
        assert admission.enter("mail") is admission.waiting[1]

    in_loop(story)


def test_no_app_keeps_another_one_out(in_loop):
    async def story():
        admission = Admission(ServiceConfig(max_queue=4))
        flood = [admission.enter("flood") for _ in range(5)]
        admission.enter("mail")
        assert names(admission.waiting) == ["flood", "flood", "flood", "mail"]
        assert flood[4].refusal.status == 429  # its latest call
        admission.enter("mail")
        assert names(admission.waiting) == ["flood", "flood", "mail", "mail"]
        for app in ("mail", "flood"):  # no app ever has more than a fair share
            with pytest.raises(Refusal, match="the limit is 4"):
                admission.enter(app)
        admission.enter("notes")
        assert sorted(names(admission.waiting)) == ["flood", "mail", "mail", "notes"]

    in_loop(story)


def test_a_single_place_is_no_share(in_loop):
    async def story():
        admission = Admission(ServiceConfig(max_queue=1))
        admission.enter("mail")
        admission.enter("mail")
        with pytest.raises(Refusal):
            admission.enter("notes")

    in_loop(story)


def test_calls_that_leave_the_queue_too_late_are_counted(in_loop):
    async def story():
        admission = Admission(ServiceConfig(max_queue=4))
        admission.enter("mail")
        soon, share = Promise(Limit(0.5)), Promise(Limit.of("40 %"))

        def leave(promise, age_s, app="mail"):
            call = admission.enter(app, promise)
            call.came_s -= age_s
            admission.leave(call)
            return admission.report()["missed_in_queue"]

        assert leave(soon, 0.0) == leave(NO_PROMISE, 9.0) == leave(share, 9.0) == 0
        assert leave(Promise(tpot=Limit(0.5)), 9.0) == 0
        assert leave(soon, 0.6) == 1
        notes = {"ttft": {"promised": "40 %", "promised_ms": 2000.0}}
        admission._estimates.called("mail", None, None, notes)
        assert leave(share, 1.9) == leave(share, 9.0, "notes") == 1
        assert leave(share, 2.1) == 2
        for _ in range(4):
            admission.enter("mail", soon).came_s -= 0.6
        admission.enter("notes")
        admission.leave(admission.waiting[0])
        assert admission.n_missed == 4  # one was crowded out
        admission.stop()
        assert admission.n_missed == 6

    in_loop(story)


@pytest.mark.parametrize("kind", [Admission, Together])
def test_calls_that_leave_when_their_turn_begins_are_counted_once(in_loop, kind):
    async def story():
        admission = kind(ServiceConfig(max_queue=4))

        def leave(age_s, *, is_over=True, is_asked=False):
            call = admission.enter("mail", Promise(Limit(0.5)))
            call.came_s -= age_s
            assert admission.has_begun(call)
            if is_over:
                call.end()
            if is_asked:  # the plugin deadlines counts it
                admission.llmaas_request_end()
            admission.leave(call)
            admission.leave(call)
            return admission.report()["missed_in_queue"]

        assert leave(0.0) == 0
        assert leave(0.6) == 1
        assert leave(0.6, is_asked=True) == 1
        assert leave(0.6, is_over=False) == 1  # a route that asks the engine nothing
        assert leave(0.6) == 2

    in_loop(story)


def test_stopping_ends_those_that_wait(in_loop):
    async def story():
        admission = Admission(ServiceConfig(max_queue=4))
        running, *waiting = [admission.enter("mail") for _ in range(3)]
        admission.stop()
        assert not running.is_over
        assert [call.refusal.status for call in waiting] == [503, 503]
        assert len(admission) == 1
        for attempt in (admission.check, admission.enter):
            with pytest.raises(Refusal, match="stopping") as caught:
                attempt("mail")
            assert caught.value.status == 503
        admission.end_running()
        assert running.refusal.status == 503
        admission.leave(running)
        assert len(admission) == 0

    in_loop(story)


def test_a_call_that_is_over_is_evaluated_no_further(in_loop):
    async def story():
        admission = Admission(ServiceConfig(max_queue=1))
        admission.end_if_unwanted(STEP)  # evaluation that belongs to no call
        call = admission.enter("mail")
        admission.end_if_unwanted(STEP)
        call.end()
        with pytest.raises(Abandoned):
            admission.end_if_unwanted(STEP)
        admission.leave(call)
        admission.end_if_unwanted(STEP)

    in_loop(story)


@pytest.mark.parametrize("kind", [Admission, Together])
def test_batches_in_other_contexts_go_on(in_loop, kind):
    """A plugin that learns meanwhile is not stopped in place of a call whose client left."""

    async def story():
        admission = kind(ServiceConfig(max_queue=1))
        call = admission.enter("mail")
        engine = SimpleNamespace(ctx=STEP.ctx, llama=SimpleNamespace(n_batch=512))
        admission.llmaas_request_begin(SimpleNamespace(engine=engine), None)
        call.end()
        other = DecodeStep(STEP.ctx + 1, 32, 0.1)
        admission.llmaas_prefill(other)
        admission.end_if_unwanted(other)
        assert admission._estimates.piece() == MOST_PIECE  # it tells nothing about prompts
        with pytest.raises(Abandoned):
            admission.end_if_unwanted(STEP)

    in_loop(story)


def test_a_call_ends_once(in_loop):
    async def story():
        admission = Admission(ServiceConfig(max_queue=1))
        call = admission.enter("mail")
        call.end()  # its client left
        admission.end_running()
        assert call.refusal is None

    in_loop(story)
