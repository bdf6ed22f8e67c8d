"""The check of C includes."""

from __future__ import annotations

import pytest

from llmaas_eval.house.includes import wrong_includes


@pytest.fixture
def findings(tmp_path):
    """Return a function that writes files, and returns what is wrong with their includes."""

    def check(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        found = wrong_includes(tmp_path, ("base", "backend/top"))
        return [finding.removeprefix(str(tmp_path)) for finding in found]

    return check


def test_downward_includes_are_right(findings):
    files = {
        "base/a.h": "",
        "base/a.c": '#include "a.h"\n#include <stdio.h>\n#include "ggml.h"',
        "backend/top/b.h": "",
        "backend/top/b.c": '#include "top/b.h"\n#include "base/a.h"',
    }
    assert findings(files) == []


def test_an_upward_include_is_found(findings):
    files = {"base/a.c": '# include "top/b.h"', "backend/top/b.h": ""}
    assert findings(files) == [
        "/base/a.c: includes top/b.h, but backend/top is no layer below base"
    ]


def test_a_circle_through_c_files_is_found(findings):
    files = {"base/a.h": "", "base/a.c": '#include "base/b.h"', "base/b.h": '#include "base/a.h"'}
    (finding,) = findings(files)
    assert finding.startswith(": includes go in a circle: ")


def test_a_private_header_is_a_part_of_its_module(findings):
    files = {
        "base/a.h": "",
        "base/a_state.h": '#include "a.h"',
        "base/a.c": '#include "a_state.h"',
        "base/a_more.c": '#include "a_state.h"',
    }
    assert findings(files) == []
