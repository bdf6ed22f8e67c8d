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
    """Wait for the next attempt; return the seconds until then, and the attempt."""
    left_s = breaker.left_s
    breaker._clock.now_s += left_s - 0.001
    assert breaker.is_open
    assert breaker.begin() is None
    breaker._clock.now_s += 0.002
    attempt = breaker.begin()
    assert attempt is not None
    return round(left_s), attempt


def test_waits_double_up_to_five_minutes(breaker):
    attempt = breaker.begin()
    waits = []
    for _ in range(9):
        breaker.failed(attempt)
        wait_s, attempt = wait(breaker)
        waits.append(wait_s)
    assert waits == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    breaker.worked()
    assert (breaker.left_s, breaker.is_open) == (0, False)
    breaker.failed(breaker.begin())
    assert wait(breaker)[0] == 5


def test_one_attempt_probes(breaker):
    breaker.failed(breaker.begin())
    _, attempt = wait(breaker)
    assert breaker.is_open
    assert breaker.begin() is None
    breaker.gave_up(attempt)  # it tells nothing, so the next one probes
    assert breaker.begin() is not None
    breaker.worked()
    assert breaker.begin() is not None
    assert breaker.begin() is not None


@pytest.mark.parametrize("end", [CircuitBreaker.failed, CircuitBreaker.gave_up])
def test_one_attempt_probes_while_earlier_ones_end(breaker, end):
    first, late = breaker.begin(), breaker.begin()
    breaker.failed(first)
    _, probe = wait(breaker)
    end(breaker, late)
    assert breaker.is_open
    assert breaker.begin() is None
    breaker.failed(probe)
    assert wait(breaker)[0] == 10


def test_attempts_that_fail_together_count_once(breaker, clock):
    attempts = [breaker.begin() for _ in range(8)]
    for attempt in attempts:
        breaker.failed(attempt)
        clock.now_s += 0.1
    assert round(breaker.left_s, 1) == 4.2


def test_an_attempt_that_fails_after_the_wait_does_not_begin_another(breaker, clock):
    first, late = breaker.begin(), breaker.begin()
    breaker.failed(first)
    clock.now_s += 6
    breaker.failed(late)
    assert breaker.begin() is not None


def test_a_late_success_ends_the_wait(breaker):
    first = breaker.begin()
    assert breaker.begin() is not None
    breaker.failed(first)
    assert breaker.begin() is None
    breaker.worked()
    assert breaker.begin() is not None
