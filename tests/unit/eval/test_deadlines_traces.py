"""Traces of the study of promises under load: how often each app asks, when, and what."""

from __future__ import annotations

import json

import numpy as np
import pytest

from llmaas_eval.deadlines.loaded.questions import packaged_questions, read_questions
from llmaas_eval.deadlines.loaded.traces import APP_NAMES, SHARES, counts, trace

EACH = dict.fromkeys(APP_NAMES, 50)


# -- traces --------------------------------------------------------------------------------------


def test_the_tightest_app_is_first_and_a_larger_alpha_is_more_relaxed():
    assert APP_NAMES == ("XiaoAi", "Gboard", "Shortcuts", "Octopus", "GMail", "Rewind")
    assert SHARES["XiaoAi"] == (0.2, 0.5)
    assert [*counts(0.0, 600).values()] == [100] * 6
    relaxed, tight = (np.array([*counts(alpha, 600).values()]) for alpha in (0.25, -0.25))
    assert relaxed.tolist() == [49, 63, 81, 103, 133, 171]
    assert tight.tolist() == relaxed.tolist()[::-1]


@pytest.mark.parametrize("n", [1, 7, 20, 599, 600])
@pytest.mark.parametrize("alpha", [-0.25, 0.0, 0.25])
def test_counts_have_the_sum_that_was_asked_for(alpha, n):
    found = [*counts(alpha, n).values()]
    assert sum(found) == n
    quotas = np.exp(alpha * np.arange(1, 7))
    assert np.abs(found - n * quotas / quotas.sum()).max() < 1


def test_a_trace_is_shuffled_and_repeats_with_its_seed():
    found = trace(0.25, 600, 3, EACH)
    assert found == trace(0.25, 600, 3, EACH)
    assert found != trace(0.25, 600, 4, EACH)
    assert {app: sum(one.app == app for one in found) for app in APP_NAMES} == counts(0.25, 600)
    assert [one.app for one in found] != sorted(one.app for one in found)
    gaps = np.diff([0.0, *(one.at for one in found)])
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(1, abs=0.15)
    assert gaps.std() == pytest.approx(1, abs=0.2)  # as of Poisson arrivals
    assert {one.n_answer for one in found} == set(range(16, 33))


def test_a_question_comes_again_only_after_all_others():
    questions = [one.question for one in trace(0.0, 600, 0, EACH) if one.app == "Gboard"]
    assert sorted(questions[:50]) == sorted(questions[50:]) == list(range(50))


# -- questions -----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """Return a folder with small sets in the real ones' forms."""

    def solved(name, n, word="Answer"):
        rows = [
            {
                "instruction": f"Please choose the correct answer to the question: {name} {i}?\n\n"
                f"{word}1: red {i} {word}2: blue\n\nAnswer format: answer1/answer2",
                "answer": f"answer{1 + i % 2}",
            }
            for i in range(n)
        ]
        rows.append(rows[-1])  # twice
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)

    for name in ("openbookqa", "arc-easy", "arc-challenge"):
        solved(f"{name}_train", 7)
        solved(f"{name}_test", 4)
    solved("piqa_test", 9, "Solution")
    names = [f"do {i}" for i in range(8)]
    rows = [f"please {i},{','.join(names)},{'ABCDEFGH'[i % 8]}\n" for i in range(16)]
    (tmp_path / "octopus_android_val.csv").write_text("\ufeff" + "".join(rows), encoding="utf-8")
    rows = [f"open {i}\tApp {i % 7}\n" for i in range(14)]
    (tmp_path / "llamatouch_test.tsv").write_text("".join(rows))
    return tmp_path


def test_questions_follow_five_solved_examples_of_other_rows(folder):
    apps = read_questions(folder)
    assert {*apps} == {*APP_NAMES}
    for app, each in apps.items():
        n_shots = 6 if app == "Octopus" else 5
        assert each.prefix.count("Question: ") == each.prefix.count("\nAnswer: ") == n_shots
        assert each.prompt(0).startswith(each.prefix)
        assert each.prompt(0).endswith("\nAnswer:")
        texts = [one.text for one in each.questions]
        assert len({*texts}) == len(texts)
        assert not any(f"Question: {text}\n" in each.prefix for text in texts)
    assert len(apps["Gboard"].questions) == 4  # of nine and a copy, five are examples
    assert apps["Rewind"].questions[1] == ("openbookqa_test 1?", ["red 1", "blue"], 1)


def test_requests_have_their_own_words_and_not_the_answer(folder):
    apps = read_questions(folder)
    assert apps["Octopus"].prefix.startswith("Functions: do 0, do 1")
    first = apps["Octopus"].questions[0]
    assert (first.text, first.choices[first.choice]) == ("please 6", "do 6")
    first = apps["Shortcuts"].questions[0]
    assert (first.text, first.choices[first.choice]) == ("open 5", "App 5")


def test_a_set_without_usable_questions_is_an_error(folder):
    (folder / "piqa_test.jsonl").write_text("")
    with pytest.raises(ValueError, match="found 0 examples and 0 questions"):
        read_questions(folder)


def test_packaged_text_has_as_many_questions_as_a_trace_needs():
    apps = packaged_questions()
    assert {*apps} == {*APP_NAMES}
    assert min(len(each.questions) for each in apps.values()) > counts(0.25, 600)["Rewind"]
    assert len({each.prefix for each in apps.values()}) == len(apps)
