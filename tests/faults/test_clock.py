"""The store uses an order of use and no time, so a jumping clock changes nothing."""

from __future__ import annotations

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("jump", [86_400, -86_400, 10**9])
def test_jumping_clock_changes_nothing(run_preloaded, tmp_path, jump):
    steady = run_preloaded("clocks.py", tmp_path / "steady", 0)
    jumping = run_preloaded("clocks.py", tmp_path / "jumping", jump)
    assert (steady["hours"], jumping["hours"]) == (1, 2)  # the clock did jump
    assert jumping["steps"] == steady["steps"]
    assert steady["steps"][-1]["keys"]  # evictions follow the order of use
