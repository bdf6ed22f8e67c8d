"""Adapters that ``llmaas setup`` learns after the search for widths."""

from __future__ import annotations

import functools

import pytest
from forked_commands import fork_children

from llmaas_eval.families import write_family
from llmaas_plugins.cli.main import main
from llmaas_plugins.cli.setup import extents, steps
from llmaas_plugins.elastic.metadata import read_elastic
from llmaas_plugins.model.digest import file_digest

pytest.importorskip("torch", reason="make test-train installs it")


@pytest.fixture
def quickly(monkeypatch):
    """Let each step read less text, and adapters be learned for two levels."""
    monkeypatch.setattr(extents, "_TOKENS", (2048, 2048))
    prepare, recover, words = steps._prepare, steps._recover, steps._words
    monkeypatch.setattr(steps, "_prepare", lambda job: (*prepare(job), "--tokens", "512"))
    for name, step_of, options in (
        ("_recover", recover, ("--levels", "0.5,0.2")),
        ("_words", words, ("--texts", "32")),
    ):
        monkeypatch.setattr(steps, name, functools.partial(longer, step_of, options))


def longer(step_of, options, job):
    """Return a step with more options."""
    step = step_of(job)
    return step._replace(arguments=(*step.arguments, *options))


@pytest.mark.usefixtures("quickly")
def test_adapters_are_learned_for_the_searched_widths(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    fork_children(monkeypatch)
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
