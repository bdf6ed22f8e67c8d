"""``llmaas elastic profile`` on a small model."""

from __future__ import annotations

import argparse
import errno
import json
import os

import pytest
from preparing import prepare

from llmaas_hooks import ConfigError, LlmaasError, StoreError
from llmaas_plugins.cli.elastic.profile import add_profile
from llmaas_plugins.cli.interrupts import Stopped
from llmaas_plugins.elastic import latency, profiling

LEVELS = (1.0, 0.5, 0.2)


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(latency, "DIRECTORY", tmp_path / "latency")
    monkeypatch.setattr(profiling, "_REPEATS", 2)

    def run(model, *options):
        parser = argparse.ArgumentParser()
        add_profile(parser.add_subparsers())
        args = parser.parse_args(["profile", str(model), *options])
        return int(args.func(args))

    return run


@pytest.mark.slow
def test_what_is_measured_is_printed_and_found_again(run, reference_model, tmp_path, capsys):
    tables = ("uniform", "searched")
    model = prepare(reference_model, tmp_path / "model.gguf", levels=LEVELS, tables=tables)
    options = "--prompts", "32,8", "--threads", "1", "--table", "uniform", "--json"
    assert run(model, *options) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["path"] == str(latency.latency_path(model, "uniform"))
    assert report["table"] == "uniform"
    found = latency.Latency.load(latency.latency_path(model, "uniform"))
    assert (found.levels, found.threads) == (LEVELS, (1,))
    assert (found.ttft.n_tokens, found.ttft.held) == ((8, 32), (16,))
    assert report["ttft"] == found.ttft.model_dump(mode="json")
    assert report["tpot_errors"]["largest"] == found.tpot.errors().largest
    times = [of.ms[0][level] for of in (found.ttft, found.tpot) for level in range(3)]
    assert min(min(row) for row in times) > 0
    assert run(model, "--prompts", "8,16") == 0
    text = capsys.readouterr().out
    assert text.startswith("model.gguf, widths searched, on ")
    assert text.endswith(f"kept in {latency.latency_path(model, 'searched')}\n")
    n_tables = len({max((os.cpu_count() or 1) // 2, 1), os.cpu_count()})  # of tokens and prompts
    shown = " ".join(text.split())
    assert shown.count("level prompt of 8 prompt of 16 token after 8") == n_tables
    assert "interpolated times of the first token have errors of" in text


def test_what_cannot_be_measured(run, reference_model, tmp_path, capsys):
    with pytest.raises(ConfigError, match=r"cannot be profiled: .*`llmaas elastic prepare "):
        run(reference_model)
    with pytest.raises(ConfigError, match="at least two lengths"):
        run(reference_model, "--prompts", "32")
    with pytest.raises(StoreError, match=r"cannot read .*No such file"):
        run(tmp_path / "nothing.gguf")
    with pytest.raises(ConfigError, match=r"has 32 and 33, with no length between .* Leave one"):
        run(reference_model, "--prompts", "8,32,33,100")
    with pytest.raises(ConfigError, match=r"has 1,025 tokens, .* at most the 1,024 tokens"):
        run(reference_model, "--prompts", "8,1025")
    for wrong in ("4,32", "8,900000000", "many"):
        with pytest.raises(SystemExit):
            run(reference_model, "--prompts", wrong)
    printed = capsys.readouterr().err
    assert "4 is below 8" in printed
    assert "900000000 is above 16777216" in printed


@pytest.fixture(scope="module")
def model(reference_model, tmp_path_factory):
    return prepare(reference_model, tmp_path_factory.mktemp("m") / "model.gguf", levels=LEVELS)


def test_a_context_without_room_and_a_table_that_is_missing_are_said(run, model, monkeypatch):
    with pytest.raises(LlmaasError, match="no table 'searched'; expected one of uniform"):
        run(model, "--table", "searched")

    def refuse(*_, **_options):
        raise ValueError("Failed to create llama_context")

    monkeypatch.setattr("llama_cpp.Llama", refuse)
    with pytest.raises(ConfigError, match=r"context of 910 tokens: Fail.*use shorter --pro"):
        run(model, "--prompts", "8,900")


def test_a_place_that_cannot_be_written_to_is_said_before_measuring(
    run, model, tmp_path, monkeypatch
):
    (tmp_path / "latency").write_text("no folder")
    monkeypatch.setattr(profiling, "profile", lambda *_: pytest.fail("measures"))
    with pytest.raises(StoreError, match=r"cannot write .*/latency/.*\. Make .*/latency a folder"):
        run(model)


def test_times_that_cannot_be_kept_are_printed(run, model, monkeypatch, capsys):
    def fill(fd, data, at):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(latency, "write", fill)
    with pytest.raises(StoreError, match="No space left on device"):
        run(model, "--prompts", "8,10", "--threads", "1")
    printed = capsys.readouterr().out
    assert "interpolated times of the tokens" in printed
    assert "kept in" not in printed


def test_it_can_be_stopped(run, model, monkeypatch):
    def press(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(profiling, "_run", press)
    with pytest.raises(Stopped, match="nothing was kept"):
        run(model)
