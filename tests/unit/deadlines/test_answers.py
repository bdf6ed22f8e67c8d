"""Kept answers: files are replaced as a whole, and read without trust."""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import pytest
from answered import COARSE, LEVELS, N_ANSWER, SHARES, answers, with_shorter

from llmaas_hooks import StoreError
from llmaas_plugins.deadlines import answers as module
from llmaas_plugins.deadlines.answers import Answers, Shorter, answers_path
from llmaas_plugins.deadlines.config import Risk
from llmaas_plugins.deadlines.learned import Learned, Lessons
from llmaas_plugins.deadlines.policies import WHOLE
from llmaas_plugins.files.array_file import write_arrays

ID, RISK = "0" * 32, Risk(0.1, 0.95)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "DIRECTORY", tmp_path)
    return tmp_path


def save(found, app=None):
    path = answers_path(ID, app)
    found.save(path, ID)
    return path


def test_what_is_saved_is_read():
    found = answers(50)
    read = Answers.load(save(found), ID)
    assert (read.levels, read.n_answer) == (LEVELS, N_ANSWER)
    for name in ("n_prompt", "leads", "margins"):
        np.testing.assert_array_equal(getattr(read, name), getattr(found, name))
    assert Answers.load(answers_path(ID, "mail"), ID) is None


def test_answers_to_shorter_prompts_are_kept_beside():
    found = with_shorter(answers(50))
    read = Answers.load(save(found), ID)
    assert read.shorter[:2] == (SHARES, COARSE)
    np.testing.assert_array_equal(read.shorter.leads, found.shorter.leads)
    np.testing.assert_array_equal(read.leads, found.leads)
    rows = np.array([3, 1])
    np.testing.assert_array_equal(read.some(rows).shorter.leads, found.shorter.leads[rows])


def test_files_of_the_first_version_have_whole_prompts_only():
    found = answers(50)
    path, arrays = save(found), {"n_prompt": found.n_prompt, "leads": found.leads}
    about = {"format": "llmaas-outcomes", "version": 1, "levels_id": ID}
    about |= {"levels": list(LEVELS), "n_answer": N_ANSWER}
    write_arrays(path, about, arrays | {"margins": found.margins})
    read = Answers.load(path, ID)
    assert read.shorter is None
    np.testing.assert_array_equal(read.leads, found.leads)
    write_arrays(path, about | {"version": 3}, arrays | {"margins": found.margins})
    with pytest.raises(StoreError, match="another version"):
        Answers.load(path, ID)


LEADS = np.zeros((50, 2, 3, 3), np.uint8)


@pytest.mark.parametrize(
    "wrong",
    [
        Shorter((0.5, 0.7), COARSE, LEADS),
        Shorter((1.0, 0.7), COARSE, LEADS),
        Shorter((0.7, 0.0), COARSE, LEADS),
        Shorter(("a", "b"), COARSE, LEADS),
        Shorter((), COARSE, LEADS[:, :0]),
        Shorter(tuple(0.9 - i / 20 for i in range(9)), COARSE, np.zeros((50, 9, 3, 3), np.uint8)),
        Shorter(SHARES, (1.0, 0.7, 0.4), LEADS),
        Shorter(SHARES, (1.0, 0.8, 0.6), LEADS),
        Shorter(SHARES, (0.4, 0.6, 1.0), LEADS),
        Shorter(SHARES, (), LEADS[..., :0]),
        Shorter(SHARES, COARSE, LEADS[:49]),
        Shorter(SHARES, COARSE, LEADS.astype(np.int32)),
        Shorter(SHARES, COARSE, LEADS + np.uint8(N_ANSWER + 1)),
    ],
)
def test_impossible_answers_to_shorter_prompts_are_refused(wrong):
    path = save(dataclasses.replace(answers(50), shorter=wrong))
    with pytest.raises(StoreError, match=r"cannot be used: .*deadlines learn` makes a new"):
        Answers.load(path, ID)


@pytest.mark.parametrize(
    "wrong",
    [
        {"leads": np.full((50, 4, 4), 5, np.uint8)},
        {"leads": np.zeros((50, 4), np.uint8)},
        {"leads": np.zeros((50, 4, 4), np.float64)},
        {"margins": np.full((50, 4), np.nan, np.float32)},
        {"margins": np.full((50, 4), -1, np.float32)},
        {"margins": np.ones((49, 4), np.float32)},
        {"n_prompt": np.zeros(50, np.int32)},
        {"levels": (1.0, 0.8, 0.8, 0.4)},
        {"levels": (1.0, 0.8, 0.6, 7)},
        {"levels": ("a", "b", "c", "d")},
        {"n_answer": 65},
        {"n_answer": 0},
    ],
)
def test_impossible_answers_are_refused(wrong):
    path = save(dataclasses.replace(answers(50), **wrong))
    with pytest.raises(StoreError, match=r"cannot be used: .*deadlines learn` makes a new"):
        Answers.load(path, ID)


@pytest.mark.parametrize(
    "about",
    [
        {},
        {"levels": list(LEVELS)},
        {"levels": 3, "n_answer": 4},
        {"levels": [], "n_answer": "4"},
        {"levels": list(LEVELS), "n_answer": 4, "shares": 0.5, "levels_of_shares": [0.4]},
    ],
)
def test_impossible_descriptions_are_refused(about):
    path = save(answers(50))
    arrays = {"n_prompt": np.ones(1, np.int32), "shorter_leads": LEADS}
    whole = {"format": "llmaas-outcomes", "version": 2, "levels_id": ID}
    for description in (about, whole | about):
        write_arrays(path, description, arrays)
        with pytest.raises(StoreError, match="cannot be used"):
            Answers.load(path, ID)


def test_damaged_files_and_files_of_other_models_are_refused():
    path = save(answers(50))
    content = path.read_bytes()
    with pytest.raises(StoreError, match="belongs to another model"):
        Answers.load(path, "1" * 32)
    for damaged in (content[: len(content) // 2], b"", b"text", content.replace(b"\x04", b"\x03")):
        path.write_bytes(damaged)
        with pytest.raises(StoreError, match="cannot be used"):
            Answers.load(path, ID)


def test_damaged_answers_are_logged_once_and_planning_goes_on(caplog):
    path, lessons = save(answers(50)), Lessons()
    path.write_bytes(path.read_bytes()[:-100])
    for _ in range(3):
        assert lessons.about(ID, None, N_ANSWER, RISK) == Learned(None, (WHOLE,))
    assert caplog.text.count("is not used") == 1


def test_a_file_that_is_replaced_is_read_again():
    lessons = Lessons()
    assert lessons.about(ID, None, N_ANSWER, None) == Learned()
    path = save(answers(50))
    first = lessons.about(ID, None, N_ANSWER, None)
    assert first.worth is not None
    assert lessons.about(ID, None, N_ANSWER, None) is first
    save(answers(50, risk=0.3))
    os.utime(path, ns=(1, 1))
    second = lessons.about(ID, None, N_ANSWER, None)
    assert second.worth.at(1.0, 0.4, 50) < first.worth.at(1.0, 0.4, 50)
    path.unlink()
    assert lessons.about(ID, None, N_ANSWER, None).worth is None


def test_an_apps_own_answers_go_before_general_ones():
    save(answers(1000))
    save(answers(1000, risk=0.3, prefill_risk=0.3), "mail")
    lessons = Lessons()
    general, own = (lessons.about(ID, app, N_ANSWER, RISK) for app in ("notes", "mail"))
    assert len(general.policies) > 5
    assert own.policies == (WHOLE, *own.policies[1:])
    assert len(own.policies) < len(general.policies)
    assert own.worth.at(1.0, 0.4, 50) < 0.5


def test_answers_that_are_too_short_say_nothing_and_the_log_says_so(caplog):
    save(answers(1000))
    assert Lessons().about(ID, None, N_ANSWER + 1, RISK) == Learned()
    assert "learn --answer-tokens 5" in caplog.text
    assert Lessons().about(None, None, N_ANSWER, RISK) == Learned()


def test_names_of_apps_are_no_paths(folder):
    paths = {answers_path(ID, app) for app in (None, "mail", "../mail", "a" * 999, "\ud800")}
    assert len(paths) == 5
    assert {path.parent for path in paths} == {folder}
