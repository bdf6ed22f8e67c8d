"""docs/reference/threat-model.md: each claim names a test, and each named test exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "reference" / "threat-model.md").read_text()
CLAIMS = re.findall(r"\| claim \| test \|\n\|---\|---\|\n((?:\|.*\n)+)", PAGE)
ROWS = [row for table in CLAIMS for row in table.splitlines()]
NAMED = re.compile(r"\| .+ \| `(tests/[\w/]+\.py)::(test_\w+)` \|")


def test_there_are_claims():
    assert len(CLAIMS) == PAGE.count("| claim |") == 5
    assert len(ROWS) > 25


@pytest.mark.parametrize("row", ROWS)
def test_it_is_held_by_a_test(row):
    file, test = NAMED.fullmatch(row).groups()
    assert re.search(rf"^def {test}\(", (ROOT / file).read_text(), re.MULTILINE)
