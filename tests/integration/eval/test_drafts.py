"""The study of drafts: how often levels are right, and its tables."""

from __future__ import annotations

import pytest
from preparing import prepare

from llmaas_eval.drafts.report import TABLES
from llmaas_eval.drafts.traces import accepted_by_place, traces_of
from llmaas_plugins.elastic.drafting import MOST

PROMPTS = [[1, 400, 401, 402, 403], [1, 900, 901, 902]]
N_SAID = 6


def test_the_whole_model_is_always_right_and_a_narrow_level_is_not(reference_model, tmp_path):
    model = prepare(reference_model, tmp_path / "model.gguf")
    traces = traces_of(model, PROMPTS, (1.0, 0.2), N_SAID)
    whole, narrow = traces["1.0"], traces["0.2"]
    assert [len(whole), len(narrow)] == [len(PROMPTS) * N_SAID] * 2
    assert accepted_by_place(whole) == [1.0] * MOST
    assert accepted_by_place(narrow)[-1] < 1
    assert all(len(owns) == MOST and 0 < min(owns) <= 1 for _, owns in whole + narrow)


def test_shares_fall_with_the_place():
    found = accepted_by_place([(0, []), (1, []), (3, []), (MOST, [])])
    assert found[:4] == [0.75, 0.5, 0.5, 0.25]


def test_tables():
    side = {"peak_bytes": 200 << 20, "drafts": [
        {"level": 0.2, "passes": 10, "proposed": 30, "accepted": 12}]}  # fmt: skip
    row = {"share": 0.5, "budget": 265 << 20, "exact_s": [0.15, 0.16], "drafts_s": [0.1, 0.1],
           "accepted_by_place": {"0.2": [0.5] * MOST}, "exact": side, "drafts": side}  # fmt: skip
    (line,) = TABLES["pinned-drafts"]([{"rows": [row]}]).rows
    assert line[:4] == ["50 %", "265", "155", "100"]
    assert line[4].startswith("1.55×")
    assert line[5:8] == ["20 %", "3.0", "1.20"]
    (levels,) = TABLES["pinned-drafts-accepted"]([{"rows": [row]}]).rows
    assert levels == ["20 %", *["50 %"] * 4]
    with pytest.raises(ValueError, match="nothing was measured"):
        TABLES["pinned-drafts"]([{"rows": []}])
