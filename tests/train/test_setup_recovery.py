"""Adapters that ``llmaas setup`` learns after the search for widths."""

from __future__ import annotations

import pytest

from llmaas_eval.families import write_family
from llmaas_plugins.cli.main import main
from llmaas_plugins.cli.setup import extents
from llmaas_plugins.elastic.metadata import read_elastic
from llmaas_plugins.model.digest import file_digest

pytest.importorskip("torch", reason="make test-train installs it")


def test_adapters_are_learned_for_the_searched_widths(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(extents, "_TOKENS", (2048, 2048))
    write_family("llama", tmp_path / "model.gguf")
    command = ["setup", "model.gguf", "--skip", "learn", "profile"]
    assert main([*command, "--no-improve"]) == 0
    made = tmp_path / "model.elastic.gguf"
    digest = file_digest(made)
    assert main([*command, "--improve"]) == 0
    said = capfd.readouterr().err
    assert "step 2 of 3: learn adapters" in said
    assert "step 3 of 3: learn which words" in said
    assert file_digest(made) == digest
    assert {*read_elastic(made).tables} == {"uniform", "searched"}
    assert 'table = "searched"' in (tmp_path / "llmaas.toml").read_text()
    assert "\n[plugins.short_prompts]" in (tmp_path / "llmaas.toml").read_text()
    assert main([*command, "--improve"]) == 0
    assert "step" not in capfd.readouterr().err  # nothing is done again
    assert main([*command, "--no-improve"]) == 0  # and this run finds its own file
    assert 'table = "searched"' in (tmp_path / "llmaas.toml").read_text()
