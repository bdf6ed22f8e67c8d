"""The tables of the docs are those of ``eval/results``, and say how they were measured."""

import json
import os
from collections import Counter

import pytest

from llmaas_eval import results

NAMES = sorted(path.stem for path in results.RESULTS.glob("*.json"))
PAGES = {page: page.read_text(encoding="utf-8") for page in results.pages()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_show_the_results(page):
    assert PAGES[page] == results.rewritten(PAGES[page]), f"{page} is old: run `make results`"


def test_every_result_is_shown_once():
    shown = Counter(name for text in PAGES.values() for name in results.shown(text))
    assert shown == dict.fromkeys(NAMES, 1)


@pytest.mark.parametrize("name", NAMES)
def test_results_are_complete(name):
    result = results.load(name)
    n_columns = len(result.columns)
    assert {len(row) for row in result.rows} == {n_columns} == {len(result.align)}
    assert set(result.align) <= {"l", "r"}
    assert result.versions["llama-cpp-python"]
    assert result.source


def test_changed_cells_are_written(tmp_path, monkeypatch):
    (tmp_path / "speed.json").write_text(
        '{"command": "make bench", "machine": null, "versions": {"llama-cpp-python": "0.3.36"},'
        ' "source": "measured", "align": "lr", "columns": ["", "ms"], "rows": [["ours", "2.5"]]}'
    )
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    old = "<!-- result: speed -->\n\n| | ms |\n|---|---:|\n| ours | 3 |\n\n<!-- /result -->\n"
    found = results.rewritten(old)
    assert "|  | ms |\n|---|---:|\n| ours | 2.5 |\n" in found
    assert "*Command: `make bench`. Machine: not recorded. llama-cpp-python 0.3.36.*" in found
    assert results.rewritten(found) == found


def test_studies_write_how_they_were_run(tmp_path, monkeypatch):
    arguments = ["/usr/bin/python3", "-m", "llmaas_eval.knn", "users", "--data", "my data"]
    monkeypatch.setattr(results.sys, "orig_argv", arguments)
    results.write(tmp_path / "new" / "knn-users", {"n": 1}, [{"user": "a"}], "| user |")
    found = json.loads((tmp_path / "new" / "knn-users.json").read_text())
    assert found["command"] == "python -m llmaas_eval.knn users --data 'my data'"
    assert found["machine"].startswith(f"{os.cpu_count()} cores of ")
    assert set(found["versions"]) == {"llama-cpp-python", "llmaas-plugins"}
    assert (found["settings"], found["rows"]) == ({"n": 1}, [{"user": "a"}])
    assert (tmp_path / "new" / "knn-users.md").read_text() == "| user |\n"
