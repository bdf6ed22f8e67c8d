"""The tables of the docs are those of ``eval/results``, and say how they were measured."""

import json
import os
import re
from collections import Counter
from datetime import datetime

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
    text = (
        (tmp_path / "speed.json")
        .read_text()
        .replace('"source"', '"date": "2026-11-23", "commit": "0123456789", "source"')
    )
    (tmp_path / "speed.json").write_text(text)
    assert "0.3.36. Date: 2026-11-23. Commit: 0123456789.*" in results.rewritten(found)


def test_studies_write_how_they_were_run(tmp_path, monkeypatch):
    arguments = ["/usr/bin/python3", "-m", "llmaas_eval.knn", "users", "--data", "my data"]
    monkeypatch.setattr(results.sys, "orig_argv", arguments)
    text = results.write(tmp_path / "new" / "knn-users", {"n": 1}, [{"user": "a"}], reported)
    assert text == "1 row of 1"
    found = json.loads((tmp_path / "new" / "knn-users.json").read_text())
    assert found["command"] == "python -m llmaas_eval.knn users --data 'my data'"
    assert found["machine"].startswith(f"{os.cpu_count()} cores of ")
    assert set(found["versions"]) == {"llama-cpp-python", "llmaas-plugins"}
    assert datetime.fromisoformat(found["date"])
    assert found["commit"] is None or re.match("[0-9a-f]{10}", found["commit"])
    assert (found["settings"], found["rows"]) == ({"n": 1}, [{"user": "a"}])
    assert (tmp_path / "new" / "knn-users.md").read_text() == f"{text}\n"


def reported(document):
    return f"{len(document['rows'])} row of {document['settings']['n']}"


def test_an_installed_script_is_recorded_without_its_folder(monkeypatch):
    arguments = ["/usr/bin/python3", "/home/me/.venv/bin/llmaas", "demo", "--json", "a b.json"]
    monkeypatch.setattr(results.sys, "orig_argv", arguments)
    assert results.about()["command"] == "llmaas demo --json 'a b.json'"


def test_a_machine_without_git_has_no_commit(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert results.about()["commit"] is None
