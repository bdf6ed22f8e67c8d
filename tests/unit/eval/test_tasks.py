"""The study of tasks: questions and their tokens, answers of the engine, and the table."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np
import pytest

from llmaas_eval.sparse.ours import with_channels
from llmaas_eval.tasks import answering, plots, report
from llmaas_eval.tasks.questions import (
    Question,
    Task,
    asked,
    generated_tasks,
    mixed,
    read_tasks,
    text_of,
)
from llmaas_eval.tasks.requests import FUNCTIONS


@pytest.fixture
def data(tmp_path):
    """Return a folder with small sets."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    reviews = [{"text": f"film {i}", "label": i % 2} for i in range(9)]
    news = [{"title": f"title {i}", "text": "a \\ b", "label": 1 + i % 4} for i in range(20)]
    news.append(news[8])  # held out as row 8, so it must not be trained on here
    sets = {"sst2_train": reviews[:6], "sst2_test": reviews[6:], "ag_news_test": news}
    for name, rows in sets.items():
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    lines = [f"please {i},{','.join([*reversed(FUNCTIONS)])},{'AC'[i % 2]}\n" for i in range(4)]
    (folder / "octopus_android_val.csv").write_text("\ufeff" + "".join(lines), encoding="utf-8")
    return tmp_path


def test_tasks_are_read_and_split(data):
    tasks = read_tasks(data, 2, seed=0)
    assert {name: len(task.held_out) for name, task in tasks.items()} == {
        "sentiment": 2, "news": 2, "functions": 2,
    }  # fmt: skip
    assert tasks["sentiment"].held_out[-1] == Question("Review: film 8\nAssistant:", 0)
    news = tasks["news"]
    assert news.held_out[0] == Question("News: title 0. a b\nAssistant:", 0)
    assert len(news.training) == 17  # of 21: every eighth is held out, and so is a copy
    names = [*FUNCTIONS]
    assert [one.choice for one in tasks["functions"].held_out] == [
        names.index(names[-1]), names.index(names[-3]),
    ]  # fmt: skip


def test_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_tasks(tmp_path, 2, seed=0)


def test_requests_fill_every_slot_and_ask_for_every_function():
    task = generated_tasks(3 * len(FUNCTIONS), seed=0)["functions"]
    assert {one.choice for one in task.held_out} == set(range(len(FUNCTIONS)))
    assert not any("{" in one.prompt for one in (*task.training, *task.held_out))
    assert len(set(task.choices)) == len(FUNCTIONS)


def test_tasks_are_mixed_and_every_question_comes_once_before_one_comes_again():
    questions = [Question(str(i), 0) for i in range(5)]
    tasks = {name: Task(name, ["a"], questions, []) for name in ("one", "two")}
    drawn = list(islice(mixed(tasks, seed=1), 40))
    assert drawn == list(islice(mixed(tasks, seed=1), 40))
    for name in tasks:
        mine = [question.prompt for task, question in drawn if task.lead == name]
        assert len(mine) > 5
        for start in range(0, len(mine) - 4, 5):
            assert sorted(mine[start : start + 5]) == ["0", "1", "2", "3", "4"]


def test_tokens_of_a_question_are_those_of_its_text(tokenize):
    task = generated_tasks(21, seed=0)["functions"]
    for question in task.held_out:
        one = asked(task, question, tokenize)
        whole = [*one.prompt, *one.lead, one.choices[one.choice], *one.end]
        assert whole == tokenize(text_of(task, question)[1:])
        after = tokenize(f"a\n{text_of(task, question)}")
        assert after[-len(whole) :] == whole  # within a text, too


def test_choices_of_several_tokens_are_refused(tokenize):
    task = Task("It is", ["good", "catastrophic"], [], [])
    with pytest.raises(ValueError, match="'catastrophic' has"):
        asked(task, Question("Review: x\nAssistant:", 0), tokenize)


@pytest.fixture(scope="module")
def tokenize(reference_model):
    from llama_cpp import Llama

    llama = Llama(str(reference_model), vocab_only=True, verbose=False)
    yield lambda text: list(llama.tokenize(text.encode(), add_bos=False))
    llama.close()


@pytest.mark.slow
def test_answers_are_sparse_and_prompts_are_if_asked(reference_model, tokenize, tmp_path):
    windows = np.random.default_rng(0).integers(300, 4000, (1, 32))
    model = with_channels(reference_model, tmp_path, windows)
    task = generated_tasks(2, seed=0)["functions"]
    some = [asked(task, question, tokenize) for question in task.held_out]
    sparse = {"mode": "sparse", "sparsity": 0.7, "selection": "top_k"}
    whole = [answering.answers(model, {"mode": "exact"}, some, way) for way in answering.WAYS]
    assert whole[0].nats == pytest.approx(whole[1].nats, rel=0.05)  # batches of another size
    found = [answering.answers(model, sparse, some, way) for way in answering.WAYS]
    gaps = [np.abs(np.subtract(one.nats, whole[0].nats)) for one in found]
    assert gaps[0].min() > 1e-4
    assert gaps[1].mean() > gaps[0].mean()  # more is left out
    without_lead = [one._replace(lead=[]) for one in some]
    exact = answering.answers(model, {"mode": "exact"}, without_lead, "answers")
    assert answering.answers(model, sparse, without_lead, "answers") == exact


def row(arm, way, sparsity, right, task="news"):
    return {
        "task": task, "way": way, "arm": arm, "sparsity": sparsity, "n_choices": 4,
        "right": right, "nats": [1.5 - each for each in right],
    }  # fmt: skip


ROWS = [
    row("whole", "answers", 0.0, [1, 1, 1, 1]),
    row("whole", "answers", 0.0, [1, 0, 1, 0], "mood"),
    row("none", "answers", 0.5, [1, 1, 0, 0]),
    row("none", "answers", 0.5, [1, 0, 0, 0], "mood"),
    row("distilled", "answers", 0.5, [1, 1, 1, 0]),
    row("distilled", "answers", 0.5, [1, 0, 1, 0], "mood"),
]


def test_accuracy_is_compared_on_the_same_questions():
    table = report.TABLES["sparse-tasks"]([{"rows": ROWS}])
    assert [line[:6] for line in table.rows] == [
        ["news", "answers", "50 %", "100.0 %", "50.0 %", "75.0 %"],
        ["mood", "answers", "50 %", "50.0 %", "25.0 %", "50.0 %"],
        ["all tasks", "answers", "50 %", "75.0 %", "37.5 %", "62.5 %"],
    ]
    assert table.columns[6:] == [
        "none − whole model", "distilled − whole model", "distilled − none",
        "nats, distilled − none",
    ]  # fmt: skip
    assert table.rows[2][8].startswith("+25.0 (")
    assert table.rows[2][9].startswith("−0.250 (")
    assert "news: 4 questions, chance 25.0 %." in report.report({"rows": ROWS})
    masked = [row("none", "every token", 0.5, [0] * 4, task) for task in ("news", "mood")]
    two = [{"rows": ROWS}, {"rows": [*ROWS[:2], *masked]}]
    assert [line[1:6] for line in report.TABLES["sparse-tasks"](two).rows][3:] == [
        ["every token", "50 %", "100.0 %", "0.0 %", ""],
        ["every token", "50 %", "50.0 %", "0.0 %", ""],
        ["every token", "50 %", "75.0 %", "0.0 %", ""],
    ]


def test_a_table_needs_sparse_answers():
    with pytest.raises(ValueError, match="no rows of sparse answers"):
        report.TABLES["sparse-tasks"]([{"rows": ROWS[:1]}])


def test_the_picture_has_a_panel_for_each_task(tmp_path):
    plots.draw(ROWS, tmp_path)
    assert (tmp_path / "sparse-tasks.png").stat().st_size > 10_000
