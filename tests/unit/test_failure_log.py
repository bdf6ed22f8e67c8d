"""A repeated failure is logged once, then counted."""

from __future__ import annotations

import logging

import pytest

from llmaas_plugins.failure_log import FailureLog


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO)
    return lambda: [record.getMessage() for record in caplog.records]


def test_the_first_failure_is_told_and_the_first_after_it_worked(lines):
    failures = FailureLog(logging.getLogger("llmaas.test"))
    for n in range(5):
        failures.failed("cannot write: %s", n)
    assert failures.n_failures == 5
    assert [line.partition(";")[0] for line in lines()] == ["cannot write: 0"]
    failures.worked()
    failures.worked()
    failures.failed("cannot write: %s", 9)
    assert lines()[1:] == [
        "it works again, after 5 failures",
        "cannot write: 9; until it works again, further failures are only counted",
    ]


def test_a_sentence_goes_on_without_its_period(lines):
    failures = FailureLog(logging.getLogger("llmaas.test"))
    failures.failed("the memory budget: %s", "expected 563 MiB. A shorter context needs less.")
    end = "A shorter context needs less; until it works again, further failures are only counted"
    assert lines() == [f"the memory budget: expected 563 MiB. {end}"]
