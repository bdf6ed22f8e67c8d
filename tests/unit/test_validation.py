"""Validation while other threads fork."""

from __future__ import annotations

import threading

from forking import in_child
from pydantic import BaseModel, field_validator

from llmaas_plugins.validation import validate

is_validating = threading.Event()
done = []


class Slow(BaseModel):
    n: int

    @field_validator("n")
    @classmethod
    def _slow(cls, n: int) -> int:
        is_validating.set()
        threading.Event().wait(0.2)
        done.append(n)
        return n


def test_a_fork_waits_for_its_end():
    thread = threading.Thread(target=validate, args=(Slow, {"n": 1}))
    thread.start()
    is_validating.wait()
    assert in_child(validate_again) == 0
    thread.join()


def validate_again():
    assert done == [1]
    assert validate(Slow, {"n": 2}).n == 2
