"""``llmaas elastic profile`` on a small model."""

from __future__ import annotations

import argparse
import json

import pytest
from preparing import prepare

from llmaas_hooks import ConfigError
from llmaas_plugins.cli.elastic_profile import add_profile_options, profile
from llmaas_plugins.elastic import latency, profiling

LEVELS = (1.0, 0.5, 0.2)


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(latency, "DIRECTORY", tmp_path / "latency")
    monkeypatch.setattr(profiling, "_REPEATS", 2)

    def run(model, *options):
        parser = argparse.ArgumentParser()
        add_profile_options(parser)
        return profile(argparse.Namespace(model=model, **vars(parser.parse_args(options))))

    return run


def test_what_is_measured_is_printed_and_found_again(run, reference_model, tmp_path, capsys):
    model = prepare(reference_model, tmp_path / "model.gguf", levels=LEVELS)
    assert run(model, "--prompts", "32,8", "--threads", "1", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    found = latency.Latency.load(latency.latency_path(model, "uniform"))
    assert (found.levels, found.threads) == (LEVELS, (1,))
    assert (found.ttft.n_tokens, found.ttft.held) == ((8, 32), (16,))
    assert report["ttft"] == found.ttft.model_dump(mode="json")
    assert report["tpot_errors"]["largest"] == found.tpot.errors().largest
    times = [of.ms[0][level] for of in (found.ttft, found.tpot) for level in range(3)]
    assert min(min(row) for row in times) > 0
    assert run(model, "--prompts", "8,16") == 0
    text = capsys.readouterr().out
    assert " ".join(text.split()).count("level prompt of 8 prompt of 16 token after 8") == 1
    assert "interpolated times of the first token are off by" in text


def test_what_cannot_be_measured(run, reference_model, tmp_path, capsys):
    with pytest.raises(ConfigError, match=r"cannot be profiled: .*`llmaas elastic prepare "):
        run(reference_model)
    with pytest.raises(ConfigError, match="two lengths or more"):
        run(reference_model, "--prompts", "32")
    with pytest.raises(ConfigError, match="found no file"):
        run(tmp_path / "nothing.gguf")
    for wrong in ("4,32", "many"):
        with pytest.raises(SystemExit):
            run(reference_model, "--prompts", wrong)
    assert "4 is below 8" in capsys.readouterr().err
