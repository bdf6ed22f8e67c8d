"""Waits between attempts at a service that fails."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi")

from llmaas_plugins.server.circuit_breaker import CircuitBreaker


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def breaker(clock):
    return CircuitBreaker(clock)


def wait(breaker):
    """Return the seconds until the next attempt, and begin that one."""
    left_s = breaker.left_s
    breaker._clock.now_s += left_s - 0.001
    assert breaker.is_open
    assert not breaker.begin()
    breaker._clock.now_s += 0.002
    assert breaker.begin()
    return round(left_s)


def test_waits_double_up_to_five_minutes(breaker):
    assert breaker.begin()
    waits = []
    for _ in range(9):
        breaker.failed()
        waits.append(wait(breaker))
    assert waits == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    breaker.worked()
    assert (breaker.left_s, breaker.is_open) == (0, False)
    breaker.failed()
    assert wait(breaker) == 5


def test_one_attempt_probes(breaker):
    breaker.failed()
    wait(breaker)
    assert breaker.is_open
    assert not breaker.begin()
    breaker.gave_up()  # it tells nothing, so the next one probes
    assert breaker.begin()
    breaker.worked()
    assert breaker.begin()
    assert breaker.begin()


def test_attempts_that_fail_together_count_once(breaker, clock):
    assert all(breaker.begin() for _ in range(8))
    for _ in range(8):
        breaker.failed()
        clock.now_s += 0.1
    assert round(breaker.left_s, 1) == 4.2


def test_a_late_success_ends_the_wait(breaker):
    assert breaker.begin()
    assert breaker.begin()
    breaker.failed()
    assert not breaker.begin()
    breaker.worked()
    assert breaker.begin()
