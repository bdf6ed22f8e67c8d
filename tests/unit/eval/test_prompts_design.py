"""What parts of ElastiLM's design give, and words by tiny models: choices, stretches and tables."""

from __future__ import annotations

import numpy as np
import pytest

from llmaas_eval.prompts import design_tables, word_scorer_tables
from llmaas_eval.prompts.design_outcomes import (
    FINE,
    LEVELS,
    SHARES,
    Outcomes,
    costs_of,
    in_steps,
    limited,
    parts,
    steps,
    strategies,
)
from llmaas_eval.prompts.gap import settings
from llmaas_eval.prompts.stretches import by_stretch
from llmaas_eval.prompts.tiny_encoders import Encoder, Size
from llmaas_eval.prompts.word_scorers import ATTENTION, BY_WORD, shortenings
from llmaas_eval.prompts.words import shortened
from llmaas_plugins.short_prompts.scorer import Prompt

COSTS = [(n / 10, [n / 10, n / 10]) for n in range(10, 1, -1)]
"""Times that are proportional to the level."""
N = 8


def outcome(number, design, is_right, kind="meetings"):
    return {
        "number": number, "design": design, "half": number % 2, "kind": kind,
        "document": str(number), "is_right": is_right,
    }  # fmt: skip


def in_all_steps(is_right):
    """Return a prompt's outcomes by share and level."""
    return [[is_right(share, level) for level in FINE] for share in FINE]


def with_design(is_right):
    return [
        [[is_right(*one) for one in settings([s], [p], LEVELS)] for p in LEVELS] for s in SHARES
    ]


# -- stretches -------------------------------------------------------------------------------------


def test_the_best_stretch_is_kept_first_and_the_next_one_fills_the_room():
    starts = np.array([0, 1, 3, 4, 6, 9, 10], np.int32)
    nothing = np.zeros(6, bool)
    prompt = Prompt(np.arange(10, dtype=np.int32), starts, tuple("abcdef"), nothing, nothing, 6)
    begins = np.array([True, False, True, False, True, False])
    scores = np.array([9, 0, 4, 5, 1, 2], np.float32)
    found = by_stretch(prompt, scores, begins)
    assert found.tolist() == pytest.approx([3, 3, 14 / 3, 14 / 3, 1.25, 1.25])
    assert shortened(prompt, scores, 0.4).tolist() == [0, 3, 4, 5]
    assert shortened(prompt, found, 0.4).tolist() == [0, 3, 4, 5]
    assert shortened(prompt, found, 0.6).tolist() == [0, 1, 2, 3, 4, 5]
    begins[0] = False
    assert by_stretch(prompt, scores, begins).tolist() == found.tolist()


# -- designs ---------------------------------------------------------------------------------------


def test_costs_between_levels_are_interpolated():
    found = costs_of(COSTS)
    assert list(found) == list(FINE)
    assert found[0.35] == pytest.approx((0.35, 0.35))


def test_a_setting_is_chosen_on_the_other_half():
    """The first setting suits one half, and the second one the other: both choose wrongly."""
    right = np.array([[1.0, 0.0], [0.0, 1.0]] * 4)
    halves, kinds = np.arange(N) % 2, np.array(["a"] * N)
    of = Outcomes(right, settings([1.0], [1.0, 0.5], [1.0]), halves, kinds, kinds)
    mask = np.ones(2, bool)
    assert of.constant(mask).tolist() == [0] * N
    assert of.oracle(mask).tolist() == [1] * N
    assert of.random(mask).tolist() == [0.5] * N
    assert of.constant(np.array([True, False])).tolist() == [1, 0] * 4
    assert of.constant(~mask) is None
    by_kind = of._replace(right=np.array([[1.0, 0.0]] * 4 + [[0.0, 1.0]] * 4),
                          kinds=np.array(["a"] * 4 + ["b"] * 4))  # fmt: skip
    assert by_kind.by_kind(mask).tolist() == [1] * N


def test_finer_steps_and_strategies_differ_where_only_one_setting_is_right():
    """Only 35 % of the prompt with the whole model is right; in larger steps nothing is."""
    rows = [
        outcome(i, "steps", in_all_steps(lambda share, level: (share, level) == (0.35, 1.0)))
        for i in range(N)
    ]
    found = steps(rows, costs_of(COSTS), (40, 100))
    assert {size: float(values[0].mean()) for size, values in found.items()} == {20: 0, 10: 0, 5: 1}
    rows = [
        outcome(i, "steps", in_all_steps(lambda share, level: (share, level) == (0.5, 0.8)))
        for i in range(N)
    ]
    values = strategies(rows, costs_of(COSTS), (50, 80))
    means = {name: float(one.mean()) for name, one in values.items()}
    assert means["best constant"] == means["best by kind"] == means["oracle"] == 1
    assert means["widest model, then most of the prompt"] == 1
    assert means["most of the prompt, then widest model"] == 0
    assert 0 < means["random"] < 0.2
    lines = design_tables.TABLES["prompts-equal-times"]([output("design", rows)]).rows
    assert [line[:2] for line in lines[:4]] == [
        ["35 %", "100 %"], ["45 %", "80 %"], ["70 %", "50 %"], ["100 %", "40 %"],
    ]  # fmt: skip


def test_the_tiny_models_time_counts_where_words_are_left_out():
    rows = [outcome(0, "steps", in_all_steps(lambda *_: True))]
    of = in_steps(rows)
    may = limited(of, costs_of(COSTS), (50, 100))
    found = {one[:2] for one, is_in in zip(of.some, may, strict=True) if is_in}
    assert (1.0, 0.5) in found
    assert (0.5, 1.0) not in found
    assert (0.45, 1.0) in found


def test_parts_are_compared_with_the_whole_design():
    def whole(share, prefill, decode):
        return share == 0.5

    rows = [
        outcome(i, design, with_design(is_right))
        for design, is_right in (
            ("all", whole), ("score head", lambda *_: False), ("recovery", whole),
            ("reordering", whole),
        )
        for i in range(N)
    ]  # fmt: skip
    found = parts(rows, costs_of(COSTS), (60, 80))
    means = {name: float(values.mean()) for name, values in found.items()}
    assert means["all"] == means["recovery"] == means["separate levels"] == 1
    assert means["score head"] == means["shorter prompts"] == 0
    assert 0 < means["decision"] < 1
    assert parts(rows, costs_of(COSTS), (19, 50))["shorter prompts"] is None
    rows += [outcome(i, "steps", in_all_steps(lambda *_: True)) for i in range(N)]
    table = design_tables.TABLES["prompts-design-parts"]([output("design", rows)])
    assert table.rows[-1][:3] == [
        "all", "100.0 % (100.0–100.0)", "−100.0 (−100.0 to −100.0)",
    ]  # fmt: skip
    assert "impossible" not in table.rows[-1]


# -- words -----------------------------------------------------------------------------------------


def output(study, rows, **found):
    return {"settings": {"study": study, "costs": COSTS, **found}, "rows": rows}


def test_tiny_models_are_compared_at_equal_tokens_and_in_equal_time():
    encoders = [
        Encoder(Size(6, 3), None, 10_000_000, 0.8),
        Encoder(Size(2, 1), None, 4_000_000, 0.7),
    ]
    ways = list(shortenings(encoders))
    timed = {(one.scorer, one.share): one.tokens for one in ways if one.is_timed}
    assert timed["6 layers, 3 shared", 0.5] == pytest.approx(0.45)
    assert timed["2 layers, 1 shared", 0.5] == pytest.approx(0.48)
    rows = [
        one._asdict() | {"number": i, "document": str(i), "kept": one.tokens, "kl": 0.1,
                         "agrees": one.scorer[0] == "6" or one.unit != BY_WORD}
        for one in ways
        for i in range(N)
    ]  # fmt: skip
    sizes = [
        {"scorer": str(one.size), "n_active": one.n_active, "auc": one.auc} for one in encoders
    ]
    found = [output("word_scorers", rows, sizes=sizes)]
    lines = word_scorer_tables.TABLES["prompts-tiny-sizes"](found).rows
    assert lines[0] == ["6 layers, 3 shared", "10.0 M", "80.0 %", *["100.0 %"] * 4]
    assert lines[1][3] == "0.0 %, −100.0 (−100.0 to −100.0)"
    lines = word_scorer_tables.TABLES["prompts-words-by-share"](found).rows
    assert {line[1] for line in lines} >= {"score head", ATTENTION, "random"}
    lines = word_scorer_tables.TABLES["prompts-score-head"](found).rows
    assert lines[0][:3] == ["agree", "90 %", "+100.0 (+100.0 to +100.0)"]
    lines = word_scorer_tables.TABLES["prompts-stretches"](found).rows
    by_attention = [line for line in lines if line[0] == ATTENTION]
    assert {line[4] for line in by_attention} == {"+100.0 (+100.0 to +100.0)"}
