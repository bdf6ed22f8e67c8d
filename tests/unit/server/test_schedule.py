"""Which call goes first, and when a running one is interrupted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmaas_plugins.server.schedule import Job, due_s, first_due, interrupting, room_s

NOW = 100.0


def job(due, need, came=0.0):
    """Return a job whose output is due so many seconds from now."""
    return Job(NOW + due, need, came)


def test_the_job_that_is_due_first_is_first():
    assert first_due([job(3, 1), job(1, 9), job(2, 0)]) == 1


def test_equals_keep_the_order_of_their_arrival():
    assert first_due([job(1, 1, came=5.0), job(1, 1, came=4.0)]) == 1


@pytest.mark.parametrize(
    ("limit", "due"), [(None, 300.0), (99.0, 300.0), (100.0, 100.0), (200.0, 200.0)]
)
def test_a_job_without_a_promise_or_that_is_late_is_due_at_the_last(limit, due):
    assert due_s(limit, NOW, 300.0) == due


@pytest.mark.parametrize(
    ("running", "others", "expected"),
    [
        (job(9, 1), [job(3, 1)], None),  # it can wait
        (job(9, 1), [job(1.5, 1)], 0),
        (job(1.5, 1), [job(1.5, 1)], None),  # the running one would be late instead
        (job(9, 1), [job(0.5, 1)], None),  # it is late in any case
        (job(9, 1), [job(0.5, 1), job(1.5, 1)], 1),
        (job(9, 2), [job(3.5, 1), job(2.5, 0.9)], 1),  # together they cannot wait
        (job(9, 2), [job(9, 1), job(4, 1)], None),
        (job(9, 1), [], None),
        (job(9, 1), [job(1.5, 1), job(-3, 1)], 1),  # nothing goes before one that is overdue
        (job(1.5, 1), [job(1.5, 0.1), job(-3, 1)], None),
    ],
)
def test_a_job_is_interrupted_for_one_that_cannot_wait(running, others, expected):
    assert interrupting(running, others, NOW) == expected


times = st.floats(0, 20, allow_nan=False)
jobs = st.builds(job, times, times, times)


@given(jobs, st.lists(jobs, max_size=6))
def test_a_job_that_is_interrupted_is_in_time_after_the_one_before_it(running, others):
    found = interrupting(running, others, NOW)
    if found is not None:
        assert NOW + others[found].need_s + running.need_s <= running.due_s
        is_overdue = others[found].due_s <= NOW
        assert is_overdue or others[found].due_s >= NOW + others[found].need_s


@given(st.lists(jobs, max_size=6))
def test_those_behind_are_in_time_if_the_room_is_kept(behind):
    room = room_s(behind, NOW)
    in_order = sorted(behind, key=lambda one: (one.due_s, one.came_s))
    before, slacks = 0.0, []
    for one in in_order:
        before += one.need_s
        slacks.append(one.due_s - NOW - before)
    assert room == min((slack for slack in slacks if slack > 0), default=None)
