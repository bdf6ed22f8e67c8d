"""``llmaas doctor --model``: how plugins would treat a model, and what they lack for it."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from llmaas_plugins.cli.doctor import trial
from llmaas_plugins.cli.main import main
from llmaas_plugins.machine import resident_bytes


@pytest.fixture
def model(reference_model, tmp_path):
    return shutil.copy(reference_model, tmp_path / "m.gguf")


@pytest.fixture
def examined(tmp_path, capfd, model):
    """Return a function that runs doctor and returns its exit status and its findings by name."""

    def run(path=model, **tables):
        lines = []
        for name, table in tables.items():
            lines.append(f"[plugins.{name}]")
            lines += [f"{key} = {json.dumps(value)}" for key, value in table.items()]
        config = tmp_path / "my.toml"
        config.write_text("\n".join(lines))
        code = main(["doctor", "--json", "--config", str(config), "--model", str(path)])
        report = json.loads(capfd.readouterr().out)
        found = {row["name"]: row for row in report["findings"] if row["section"] == "model"}
        assert all(row["next_step"] for row in found.values() if row["problem"])
        return code, found

    return run


def test_served(examined, tmp_path):
    code, found = examined(kv_chunks={"store": str(tmp_path / "kv")}, flash_weights={})
    assert code == 0
    assert found["file"]["value"].startswith(f"{tmp_path / 'm.gguf'}, llama, ")
    assert found["plugins.kv_chunks"]["value"] == "serves this model"
    assert found["plugins.flash_weights"]["value"].startswith("not needed: its ")


def test_contexts_that_the_memory_budget_leaves_too_little(examined, tmp_path):
    """A budget that holds beside an empty process is short beside the model."""
    budget = resident_bytes() + (200 << 20)
    kv = {"store": str(tmp_path / "kv"), "ram_budget": 190 << 20, "disk_budget": 0}
    code, found = examined(kv_chunks=kv, flash_weights={"memory_budget": budget})
    assert code == 1
    problem = found["plugins.kv_chunks.ram_budget"]["problem"]
    left = int(re.search(r"contexts get (\d+) of the 190 MiB", problem)[1])
    assert 50 < left < 185
    assert found["plugins.kv_chunks"]["value"] == "serves this model"


def test_what_is_missing(examined, tmp_path):
    code, found = examined(
        knn_lm={"store": str(tmp_path / "knn")}, elastic={}, flash_weights={"mode": "sparse"}
    )
    assert code == 1
    assert "there is no datastore in" in found["plugins.knn_lm"]["problem"]
    assert "`llmaas elastic prepare" in found["plugins.elastic"]["problem"]
    assert "Run `llmaas flash pack --sparse" in found["plugins.flash_weights"]["problem"]
    assert not [name for name in found if name.startswith("note")]  # nothing is reported twice


def test_without_plugins_there_is_nothing_to_note(examined):
    code, found = examined()
    assert code == 0
    assert list(found) == ["file"]


def test_a_budget_that_cannot_be_met_and_a_file_that_would_be_better(examined):
    code, found = examined(flash_weights={"memory_budget": "20 MiB"})
    assert code == 1
    assert "a memory_budget of 20 MiB cannot be met" in found["plugins.flash_weights"]["problem"]
    assert "`llmaas flash pack" in found["note 1"]["value"]


def test_a_model_that_does_not_fit(examined, monkeypatch):
    monkeypatch.setattr(trial, "available_bytes", lambda: 1 << 20)
    code, found = examined()
    assert code == 1
    assert "do not fit into memory, which has 1 MiB" in found["memory"]["problem"]
    assert "llmaas flash plan" in found["memory"]["next_step"]


@pytest.mark.parametrize("content", [None, b"", b"GGUF", b"hello, this is no model at all" * 9])
def test_what_is_no_model(examined, tmp_path, content):
    path = tmp_path / "no.gguf"
    if content is not None:
        path.write_bytes(content)
    code, found = examined(path)
    assert (code, list(found), found["file"]["next_step"]) == (1, ["file"], "give a model in GGUF")


def test_a_header_alone(examined, model):
    with model.open("r+b") as file:
        file.truncate(4 << 20)
    code, found = examined(model)
    assert code == 1
    assert found["opening it"]["problem"] if "opening it" in found else found["file"]["problem"]


def test_settings_that_are_wrong_are_told_once(examined):
    code, found = examined(kv_chunks={"codek": 1})
    assert code == 1
    assert "unknown key 'codek'" in found["opening it"]["problem"]
