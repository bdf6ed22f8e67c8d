"""Models that commands open: progress while a file is identified."""

from __future__ import annotations

import contextlib
import os
import re
import sys

import numpy as np
import pytest

from llmaas_eval.sizes.watching import Limits, watch
from llmaas_hooks import StoreError
from llmaas_plugins.cli import models
from llmaas_plugins.cli.main import main
from llmaas_plugins.files import digest_cache
from llmaas_plugins.model import digest
from llmaas_plugins.model.digest import file_digest

N_BYTES = 48 << 20


class Bar:
    """Progress bar that remembers where it was."""

    def __init__(self, total):
        self.total, self.n, self.seen = total, 0, []

    def update(self, n):
        self.n += n
        self.seen.append(self.n)


@pytest.fixture
def bars(monkeypatch, tmp_path):
    """Return the bars that are shown; nothing is identified yet, and polls are quick."""
    made = []

    def progress_bar(_what, _unit, total):
        made.append(Bar(total))
        return contextlib.nullcontext(made[-1])

    monkeypatch.setattr(models, "progress_bar", progress_bar)
    monkeypatch.setattr(models, "progress_bar_on_copy", progress_bar)
    monkeypatch.setattr(models, "_POLL_S", 0.001)
    monkeypatch.setattr(digest, "_SETTLED_NS", -(1 << 62))
    monkeypatch.setattr(digest, "_known", {})
    monkeypatch.setattr(digest_cache, "_directory", lambda: tmp_path / "cache")
    return made


def test_a_file_is_read_once_and_with_progress(tmp_path, bars):
    path = tmp_path / "model.gguf"
    path.write_bytes(np.random.default_rng(0).bytes(N_BYTES))
    found = models.identified(path)
    (bar,) = bars
    assert bar.total == N_BYTES
    assert bar.seen == sorted(bar.seen)
    assert any(0 < n < N_BYTES for n in bar.seen)
    assert models.identified(path) == found == file_digest(path)
    assert len(bars) == 1


def test_a_model_is_opened_with_progress(bars, reference_model):
    with models.opening(reference_model) as opened:
        assert opened.n_embd() > 0
    (bar,) = bars
    assert bar.total == bar.seen[-1] == 100
    assert any(0 < n < 100 for n in bar.seen)


def test_the_progress_of_opening_is_seen_on_a_terminal(tmp_path, reference_model):
    code = (
        "import time\n"
        "from pathlib import Path\n"
        "from llmaas_plugins.cli import models\n"
        "from llmaas_plugins.model import loading\n"
        "callback = loading._callback\n"
        "def slow(progress):\n"
        "    return callback(lambda share: (time.sleep(0.05), progress(share)))\n"
        "loading._callback = slow\n"
        f"with models.opening(Path({str(reference_model)!r})): pass\n"
    )
    said = watch([sys.executable, "-c", code], os.environ, tmp_path, Limits(60, 8 << 30)).said
    assert any(re.search(r"opening .*\b[1-9]\d?%", line) for line in said), said


def test_what_cannot_be_read_is_said(tmp_path, bars):
    with pytest.raises(StoreError, match=r"cannot read .*none\.gguf"):
        models.identified(tmp_path / "none.gguf")
    assert not bars


@pytest.fixture
def replaced(tmp_path, monkeypatch):
    """Return a file that ``llmaas.toml`` names in place of model.gguf; neither is a model."""
    model, made = tmp_path / "model.gguf", tmp_path / "made.gguf"
    model.write_bytes(b"model")
    made.write_bytes(b"made")
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "Hi"}]}')
    (tmp_path / "llmaas.toml").write_text(
        f'[models."{model}"]\nfile = "{made}"\ndigest = "{file_digest(model)}"\n'
        f'file_digest = "{file_digest(made)}"\n'
    )
    monkeypatch.delenv("LLMAAS_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)
    return made


COMMANDS = (
    *("flash pack", "flash check", "flash plan", "flash distill"),
    *("elastic show", "elastic profile", "elastic recover"),
    *("deadlines learn", "prompts explain --text chats.jsonl"),
)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_takes_the_file_that_apps_load(replaced, capsys, command):
    assert main([*command.split(), "model.gguf"]) == 2
    assert f"Apps load {replaced} in place of model.gguf" in capsys.readouterr().err


def test_a_datastore_is_built_for_the_file_that_apps_load(replaced, capsys):
    assert main(["datastore", "build", "chats.jsonl", "--store", "s", "--model", "model.gguf"]) == 2
    assert f"{replaced} is not a GGUF file" in capsys.readouterr().err


def test_a_file_that_apps_do_not_load_is_taken_as_it_is(replaced, capsys, caplog):
    assert models.as_loaded(replaced) == replaced
    replaced.write_bytes(b"changed")
    model = replaced.with_name("model.gguf")
    assert models.as_loaded(model) == model
    assert f"{replaced} was changed since" in caplog.text
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty."),
        (b"some text", "it does not begin with GGUF."),
        (b"GGUF\x63\0\0\0" + bytes(16), "it is of GGUF version 99, expected 2 or 3."),
        (b"GGUF", "its metadata is truncated."),
    ],
)
def test_a_file_that_is_no_model_says_why(tmp_path, capsys, content, reason):
    (tmp_path / "model.gguf").write_bytes(content)
    assert main(["flash", "check", str(tmp_path / "model.gguf")]) == 2
    assert f"is not a GGUF file, or is damaged: {reason}" in capsys.readouterr().err
