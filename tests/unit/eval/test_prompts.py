"""The studies of shorter prompts: words, settings under limits, and what tables count."""

from __future__ import annotations

import numpy as np
import pytest

from llmaas_eval.prompts import break_even_tables, gap_tables, narrow_tables, short_tables
from llmaas_eval.prompts.break_even import break_even, rows_of_model
from llmaas_eval.prompts.gap import Setting, chosen, costs, feasible, settings
from llmaas_eval.prompts.rows import means, paired
from llmaas_eval.prompts.scorers import by_word
from llmaas_eval.prompts.shorter import PROTECTED, QUESTION, WHOLE
from llmaas_eval.prompts.words import only_question, shortened
from llmaas_eval.results import Result
from llmaas_eval.tables import NoRowsError
from llmaas_plugins.elastic.latency import Curves, Latency, Machine
from llmaas_plugins.short_prompts.scorer import Prompt

STARTS = [0, 1, 3, 4, 6, 9, 10]


@pytest.fixture
def prompt():
    """Return six words of ten tokens, the second of which is protected."""
    n_words = len(STARTS) - 1
    return Prompt(
        np.arange(10, dtype=np.int32), np.array(STARTS, np.int32), tuple("abcdef"),
        np.arange(n_words) == 1, np.zeros(n_words, bool), n_words - 1,
    )  # fmt: skip


# -- words -----------------------------------------------------------------------------------------


def test_only_the_question_is_protected(prompt):
    found = only_question(prompt, 4)
    assert found.is_protected.tolist() == [False] * 4 + [True] * 2
    assert found.question == 4
    assert only_question(prompt, 3).question == 4  # a word is kept as a whole
    assert only_question(prompt, 1).question == 5


def test_a_share_keeps_words_with_large_scores(prompt):
    scores = np.array([1, 0, 5, 4, 3, 2], np.float32)
    assert shortened(prompt, scores, 0.6).tolist() == [1, 2, 3, 4, 5, 9]
    assert shortened(only_question(prompt, 1), scores, 0.4).tolist() == [3, 4, 5, 9]


def test_a_word_counts_as_the_mean_of_its_tokens(prompt):
    found = by_word(prompt, np.arange(10, dtype=np.float32))
    assert found.tolist() == [0, 1.5, 3, 4.5, 7, 9]


# -- settings under limits -------------------------------------------------------------------------

TIMES = Result(
    None,
    None,
    {},
    "measured",
    "lrr",
    ["level", "token, 2 threads", "512 tokens, 2 threads"],
    [["100 %", "50 ms", "1,000 ms"], ["50 %", "30", "600"], ["20 %", "10", "250 (240–260)"]],
)
SOME = settings((1.0, 0.5), (1.0, 0.5, 0.2), (1.0, 0.5))


def test_costs_are_shares_of_the_whole_models_times():
    assert costs(TIMES) == {1.0: (1.0, 1.0), 0.5: (0.6, 0.6), 0.2: (0.25, 0.2)}


def test_a_limit_excludes_long_prompts_and_wide_levels():
    may = feasible(SOME, costs(TIMES), (0.3, 0.6))
    assert [one for one, is_in in zip(SOME, may, strict=True) if is_in] == [
        Setting(1.0, 0.2, 0.5),
        Setting(0.5, 0.5, 0.5),
        Setting(0.5, 0.2, 0.5),
    ]
    assert feasible(SOME, costs(TIMES), (1.0, 1.0)).all()
    may = feasible(SOME, costs(TIMES), (0.5, 1.0), scorer=0.2)
    assert {one[:2] for one, is_in in zip(SOME, may, strict=True) if is_in} == {
        (1.0, 0.2), (0.5, 0.5), (0.5, 0.2),
    }  # fmt: skip


def test_the_oracle_takes_each_prompts_best_and_a_constant_is_chosen_on_other_prompts():
    """Setting 1 is right for prompts of one kind, and 2 for those of the other."""
    kinds = np.array(["mail", "mail", "notes", "notes", "notes", "notes"])
    quality = np.zeros((6, len(SOME)))
    quality[:, 0] = 1  # excluded below
    quality[:2, 1] = 1
    quality[2:, 2] = 1
    may = np.arange(len(SOME)) > 0
    found = chosen(quality, SOME, may, kinds)
    assert found.oracle.tolist() == [1] * 6
    assert found.best == SOME[2]
    assert found.constant.tolist() == [0, 0, 1, 1, 1, 1]
    assert found.by_kind.tolist() == [1] * 6
    quality[[2, 4], 2], quality[[2, 4], 3] = 0, 1  # every second prompt needs another setting
    found = chosen(quality, SOME, may, kinds)
    assert found.by_kind.tolist() == [1, 1, 0, 0, 0, 0]
    assert found.oracle.tolist() == [1] * 6


# -- tables ----------------------------------------------------------------------------------------


def output(study, rows, **found):
    return {"settings": {"study": study, **found}, "rows": rows}


def recalled(level, arm, right, *, context=0, distance=200):
    return {
        "probe": "facts", "context": context, "question": 0, "distance": distance,
        "level": level, "arm": arm, "right": right, "nats": 1.0,
    }  # fmt: skip


def test_recall_is_paired_with_the_whole_models():
    rows = [
        row
        for context in range(10)
        for row in (
            recalled(1.0, "prompt", True, context=context),
            recalled(0.5, "prompt", context != 0, context=context),
            recalled(0.5, "all", False, context=context),
            recalled(0.5, "conversation", True, context=context),
        )
    ]
    found = output("narrow_recall", rows)
    whole, half = narrow_tables.TABLES["prompts-narrow-recall"]([found]).rows
    assert whole[:3] == ["facts", "100 %", "100.0 % (100.0–100.0)"]
    assert half[2].startswith("90.0 % (")
    assert half[3].startswith("−10.0 (")
    assert half[5] == "+0.0 (+0.0 to +0.0)"
    assert half[6] == "0.0 % (0.0–0.0)"
    by_distance = narrow_tables.TABLES["prompts-narrow-distance"]([found]).rows
    assert [row[2] for row in by_distance] == ["", ""]  # no fact is that near
    assert by_distance[1][4].startswith("90.0 % (")


def test_gains_are_against_settings_with_whole_prompts():
    shares, levels = [1.0, 0.5], [1.0, 0.2]
    leads = [[[4, 0], [0, 0]], [[4, 0], [4, 0]]]
    nats = [[[1.0, 2.0], [3.0, 3.0]], [[1.5, 3.0], [1.5, 3.0]]]
    rows = [
        {"kind": "meetings", "number": i, "scorer": "random", "leads": leads, "nats": nats}
        for i in range(4)
    ]
    grid = {"scorers": ["random"], "shares": shares, "prefills": levels, "decodes": levels}
    found = output("oracle_gap", rows, **grid)
    lines = gap_tables.TABLES["prompts-oracle-agreement"]([found]).rows
    cells = {line[1]: line for line in lines}
    assert cells["30 % / 100 %"][2:] == [
        "50 % · 20 % · 100 %", *["100.0 % (100.0–100.0)"] * 3, "+0.0 (+0.0 to +0.0)",
        "100 % · 20 % · 100 %", "0.0 % (0.0–0.0)", "+100.0 (+100.0 to +100.0)",
    ]  # fmt: skip
    assert cells["20 % / 100 %"][7:] == ["impossible", "", ""]
    timed = [row | {"scorer": "attention"} for row in rows]
    lines = gap_tables.TABLES["prompts-oracle-agreement"](
        [output("oracle_gap", timed, **grid | {"scorers": ["attention"]})]
    ).rows
    assert [line[2] for line in lines if line[1] == "30 % / 100 %"] == [
        "50 % · 20 % · 100 %", "100 % · 20 % · 100 %",
    ]  # fmt: skip
    lines = gap_tables.TABLES["prompts-oracle-nats"]([found]).rows
    assert [line[2:4] for line in lines if line[1] == "30 % / 100 %"] == [
        ["50 % · 20 % · 100 %", "0.50"]
    ]
    lines = gap_tables.TABLES["prompts-oracle-kinds"]([found]).rows
    assert [line[:2] for line in lines] == [
        ["", "100 % · 100 % · 20 %"],
        ["", "100 % · 20 % · 100 %"],
        ["random", "50 % · 100 % · 100 %"],
    ]


def short(scorer, right, *, context=0, protection=QUESTION):
    return {
        "probe": "alike", "context": context, "question": 0, "scorer": scorer, "share": 0.5,
        "protection": protection, "kept": 0.48, "right": right, "nats": 1.0,
    }  # fmt: skip


def test_scorers_are_compared_on_the_same_questions():
    rows = [
        row
        for context in range(8)
        for row in (
            short(WHOLE, True, context=context, protection="") | {"share": 1.0, "kept": 1.0},
            short("random", False, context=context),
            short("last", context < 6, context=context),
            short("last", True, context=context, protection=PROTECTED),
        )
    ]
    lines = short_tables.TABLES["prompts-facts"]([output("facts", rows)]).rows
    assert [line[:4] for line in lines] == [
        ["", "100 %", WHOLE, "100 %"],
        [PROTECTED, "50 %", "last", "48.0 %"],
        [QUESTION, "50 %", "random", "48.0 %"],
        [QUESTION, "50 %", "last", "48.0 %"],
    ]
    assert lines[3][4].startswith("75.0 % (")
    assert lines[3][5].startswith("+75.0 (")
    assert lines[1][5] == lines[2][5] == ""  # nothing to compare with


def test_values_are_paired_by_unit():
    rows = [{"unit": unit, "kl": kl} for unit, kl in ((0, 1.0), (0, 3.0), (1, 5.0))]
    found = means(rows, lambda row: row["unit"], "kl")
    assert found == {0: 2.0, 1: 5.0}
    values, bases = paired(found, {2: 1.0, 1: 4.0})
    assert (values.tolist(), bases.tolist()) == ([5.0], [4.0])


def test_a_table_of_another_study_has_no_rows():
    with pytest.raises(NoRowsError, match="no rows of facts"):
        short_tables.TABLES["prompts-facts"]([output("oracle_gap", [])])


# -- break-even ------------------------------------------------------------------------------------


def latency(whole_ms, narrow_ms):
    """Return times that are proportional to the number of tokens, of two levels."""
    tokens, held = (100, 400), (200,)

    def table(numbers):
        return (tuple(tuple(each * n for n in numbers) for each in (whole_ms, narrow_ms)),)

    curves = Curves(
        n_tokens=tokens, ms=table(tokens), spread_ms=table(tokens), held=held, held_ms=table(held)
    )
    return Latency(
        model="m.gguf", table="uniform", machine=Machine(cpu="c", n_cpus=2, llama_cpp="1"),
        levels=(1.0, 0.2), threads=(2,), ttft=curves, tpot=curves,
    )  # fmt: skip


def test_a_scorer_must_cost_less_than_what_it_saves():
    def whole(n_tokens):
        return 1.0 * n_tokens

    assert break_even(whole, 25.0, 100) == 0.74
    assert break_even(whole, 0.0, 100) == 0.99
    assert break_even(whole, 100.0, 100) is None


def test_the_break_even_by_length():
    times = latency(1.0, 0.25)
    scorers = {"narrow attention": lambda n: times.ttft_ms(0.2, n, 2), "slow": lambda n: 2.0 * n}
    rows = list(rows_of_model(times, 2, [200, 800], scorers))
    assert [row["shorter_ms"] for row in rows] == pytest.approx([150, 500, 600, 2000])
    assert [row["share"] for row in rows] == [0.74, None, 0.74, None]
    assert [row["level"] for row in rows] == [0.2, 1.0, 0.2, 1.0]
    lines = break_even_tables.TABLES["prompts-break-even"]([output("break_even", rows)]).rows
    assert lines[0] == [
        "m.gguf", "2", "200", "narrow attention", "200", "50.0", "150", "75 %", "74 %", "20 %",
    ]  # fmt: skip
    assert lines[3][4:9] == ["≈ 800", "≈ 1600", "≈ 2000", "250 %", "never"]
