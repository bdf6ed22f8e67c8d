"""docs/how-to/elastic.md: its examples run, and its tables are true."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from preparing import prepare

from llmaas_plugins import active_suite, elastic
from llmaas_plugins.elastic import latency, profiling
from llmaas_plugins.elastic.config import ElasticConfig
from llmaas_plugins.elastic.plugin import ElasticModels

PAGE = (Path(__file__).parents[3] / "docs" / "how-to" / "elastic.md").read_text()
TABLES = ("uniform", "searched")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def folder(reference_model, tmp_path, monkeypatch):
    """Change to a folder with the files that the examples need."""
    prepare(reference_model, tmp_path / "your.elastic.gguf", tables=TABLES)
    (tmp_path / "llmaas.toml").write_text('on_error = "raise"\n[plugins.elastic]\nlevel = 1.0\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(latency, "DIRECTORY", tmp_path / "latency")
    return tmp_path


def measured():
    """Return times of a machine that is equally fast at both levels."""
    ms = (((1.0, 2.0),) * 2,)
    curves = latency.Curves(
        n_tokens=(32, 128), ms=ms, spread_ms=ms, held=(64,), held_ms=(((1.5,),) * 2,)
    )
    return latency.Latency(
        model="your.elastic.gguf",
        table="searched",
        machine=latency.Machine.this(),
        levels=(1.0, 0.6),
        threads=(2,),
        ttft=curves,
        tpot=curves,
    )


def test_examples(folder, monkeypatch):
    first, second = blocks("python")
    seen, level = [], elastic.level

    def noting(*args, **kwargs):
        seen.append(active_suite().status()["plugins"]["elastic"]["mode"])
        return level(*args, **kwargs)

    monkeypatch.setattr(elastic, "level", noting)
    exec(compile(first.replace("4096", "256"), "docs/how-to/elastic.md", "exec"), {})
    assert seen == ["elastic", "elastic"]
    measured().save(latency.latency_path(Path("your.elastic.gguf"), "searched"))
    found = {}
    exec(compile(second, "docs/how-to/elastic.md", "exec"), found)
    assert found["times"].levels == (1.0, 0.6)


def test_tables():
    (settings,) = blocks("toml")
    table = tomllib.loads(settings)["plugins"]["elastic"]
    assert list(table) == list(ElasticConfig.model_fields)
    ElasticConfig(**table)
    _, _, rest = PAGE.partition("| entry | |\n|---|---|\n")
    rows = rest.partition("\n\n")[0].splitlines()
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert named == list(ElasticModels(ElasticConfig()).llmaas_status())
    assert "three times over" in PAGE.replace("\n", " ")
    assert profiling._REPEATS == 3
