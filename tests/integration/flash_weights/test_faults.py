"""flash_weights on a failing disk, or with a changing file: an error, never other tokens."""

from __future__ import annotations

import shutil

import pytest
from flash_apps import run

PRELUDE = """
import logging, os, signal
signal.alarm(60)  # a process that hangs ends
said = []
class Listening(logging.Handler):
    def emit(self, record): said.append(record.getMessage())
logging.getLogger("llmaas").addHandler(Listening())
suite, llama = app(resident_bytes() + 40 * MIB, arena=2 * MIB)
expected = tokens(llama, 12)
def broken_off(fault):
    # A fault in the middle of an answer; what was said until then, and whether that ended it.
    found = []
    try:
        for token, i in zip(generator(llama), range(12)):
            found.append(token)
            if i == 3: fault()
    except RuntimeError as error:
        return [found == expected[:len(found)] and len(found) < 12, str(error)]
    return [False, "no error"]
def fails():
    try:
        return tokens(llama, 12) and False
    except RuntimeError:
        return True
"""


@pytest.fixture
def changed(small, tmp_path):
    """Return a copy for one test."""
    return shutil.copy(small, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        "os.truncate(path, os.path.getsize(path) // 2)",
        "file = open(path, 'r+b'); file.seek(MIB); file.write(os.urandom(12 * MIB)); file.close()",
    ],
    ids=["truncated", "overwritten"],
)
def test_a_file_that_changes_ends_the_answer(changed, fault):
    """The error is permanent, because weights in memory may come from either file version."""
    script = f"""
def fault(): {fault}
ended, error = broken_off(fault)
print(json.dumps([ended, error, fails(), said[-1]]))
"""
    ended, error, stays, message = run(changed, PRELUDE + script)
    assert ended
    assert "llama_decode returned -3" in error
    assert stays
    assert f"{changed} was changed while it was in use; load the model again" in message


@pytest.mark.slow
@pytest.mark.parametrize("room", [40, 33], ids="{} MiB".format)
def test_a_disk_that_fails_for_a_while(changed, room):
    """An unreadable descriptor of the same file simulates the failing disk.

    The failed batches leave nothing in the cells that later answers could see. With less room, the
    reads that fail are those of early layers.
    """
    script = """
import contextlib
from unreadable import unreadable
with contextlib.ExitStack() as stack:
    ended, error = broken_off(lambda: stack.enter_context(unreadable(path)))
    stays = fails()
print(json.dumps([ended, stays, tokens(llama, 12) == expected, error, said[-1]]))
"""
    prelude = PRELUDE.replace("40 * MIB", f"{room} * MIB")
    *found, error, message = run(changed, prelude + script)
    assert found == [True] * 3
    assert "llama_decode returned -3" in error
    assert "a read from the model's files failed" in message
