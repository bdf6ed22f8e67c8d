"""The examples of docs/tutorial/first-app.md, run on the packaged model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from llmaas_plugins import activate

TEXT = (Path(__file__).parents[3] / "docs" / "tutorial" / "first-app.md").read_text()
APP, ACTIVATE, SERVICE = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
(CONFIG,) = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture
def folder(tmp_path, monkeypatch, reference_model):
    """Set up a home folder with the tutorial's two files."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("app.py").write_text(APP)
    Path("llmaas.toml").write_text(CONFIG)
    return tmp_path


def run(*command):
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_app_says_the_same_with_contexts_kept(folder):
    llmaas = str(Path(sys.executable).with_name("llmaas"))
    vanilla = run(sys.executable, "app.py")
    assert len(vanilla) == 4
    lossless = f'{CONFIG}codec = "lossless"\n'
    Path("llmaas.toml").write_text(lossless)
    assert run(llmaas, "run", "--config", "llmaas.toml", "app.py") == vanilla
    assert (folder / ".cache/llmaas/kv/chunks.slab").stat().st_size > 4096
    with activate("llmaas.toml") as suite:  # the second start finds the first one's contexts
        exec(compile(APP, "docs/tutorial/first-app.md", "exec"), {})
        assert suite.status()["plugins"]["kv_chunks"]["restored_tokens"] > 0


def test_activation_in_code(folder, capsys):
    exec(compile(ACTIVATE, "docs/tutorial/first-app.md", "exec"), {})
    assert capsys.readouterr().out == "0\n"


def test_the_service(folder, capsys):
    names = {}
    exec(compile(SERVICE, "docs/tutorial/first-app.md", "exec"), names)
    assert capsys.readouterr().out.endswith(names["context"].id + "\n")
    assert len(names["mail"].contexts()) == 1
    names["service"].close()
