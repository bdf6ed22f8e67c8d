"""docs/reference/checklist.md: each test that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "reference" / "checklist.md").read_text()
NAMED = re.findall(r"`(tests/\S+?)(?:::(\w+))?` \|", PAGE)


def test_every_line_names_a_test():
    lines = [line for line in PAGE.splitlines() if "](" in line]
    assert len(NAMED) >= len(lines) > 15


@pytest.mark.parametrize(("file", "test"), NAMED)
def test_it_is_there(file, test):
    assert f"def {test}" in (ROOT / file).read_text()
