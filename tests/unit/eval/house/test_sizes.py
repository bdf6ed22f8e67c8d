"""The check of the lengths of files and functions."""

from __future__ import annotations

from llmaas_eval.house import sizes

PYTHON = """import os


class Thing:
    async def long(self):
        def inner():
            pass
        return inner


def short(): pass
"""
C = """#include "long.h"

struct pair {
    int a, b;
};

static int
wrapped(int a,
        int b) {
    return a + b;
}

enum { A, B };

void llmaas_one(void) { return; }

void llmaas_long(
    int a) {
    if (a) {
    }
}
"""


def test_lengths_of_functions():
    assert list(sizes.functions(".py", PYTHON)) == [
        ("short", 11, 1),
        ("long", 5, 4),
        ("inner", 6, 2),
    ]
    assert list(sizes.functions(".c", C)) == [("wrapped", 8, 4), ("llmaas_long", 17, 5)]


def test_files_and_functions_that_are_too_long(tmp_path):
    path = tmp_path / "thing.py"
    path.write_text("def long():\n" + "    pass\n" * 50 + "\n" * 349)
    assert [finding.partition(": ")[2] for finding in sizes.too_long(path)] == [
        "long has 51 lines, at most 50 are allowed; split it"
    ]
    path.write_text("def allowed():\n" + "    pass\n" * 49 + "\n" * 350)
    assert list(sizes.too_long(path)) == []
    path.write_text(path.read_text() + "\n")
    assert [finding.partition(": ")[2] for finding in sizes.too_long(path)] == [
        "401 lines, at most 400 are allowed; split the file"
    ]
