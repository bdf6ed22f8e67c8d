"""``llmaas elastic prepare`` announces its steps, is stopped and killed, and goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from gguf import GGMLQuantizationType as Type

from llmaas_eval.models import Shape, write_random_model
from llmaas_plugins.cli.elastic import preparing as elastic_preparing
from llmaas_plugins.cli.main import main
from llmaas_plugins.elastic.metadata import read_elastic
from llmaas_plugins.elastic.probing import TextLoss
from llmaas_plugins.elastic.units import blocks_of


def test_sigterm_leaves_the_uniform_file_and_what_was_found(
    original, tmp_path, elastic, monkeypatch
):
    path = tmp_path / "x.gguf"

    def terminated(*_args):
        assert set(read_elastic(path).tables) == {"uniform"}
        os.kill(os.getpid(), signal.SIGTERM)

    def unexpected(*_args):
        raise AssertionError("nobody took the signal")

    monkeypatch.setattr(elastic_preparing, "searched", terminated)
    before = signal.signal(signal.SIGTERM, unexpected)
    try:
        code, printed = elastic("prepare", original, "-o", path, "--tokens", 64)
        assert signal.getsignal(signal.SIGTERM) is unexpected
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (code, "stopped; run the same command again to continue" in printed) == (143, True)
    assert {entry.name for entry in tmp_path.iterdir()} == {"x.gguf", "x.gguf.progress"}
    assert set(read_elastic(path).tables) == {"uniform"}


KILLED = """
import os, signal, sys
from llmaas_plugins.cli.main import main
from llmaas_plugins.elastic import checkpoint
checkpoint._EVERY_S = 0
keep, left = checkpoint.Checkpoint.keep, int(sys.argv[1])
def kept(self, results):
    global left
    keep(self, results)
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
checkpoint.Checkpoint.keep = kept
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Return a Q8_0 model of two layers, which is searched within seconds."""
    shape = Shape(n_layer=2, n_embd=64, n_head=4, n_head_kv=2, n_ff=256, n_ctx=512)
    return write_random_model(tmp_path_factory.mktemp("small") / "model.gguf", shape, Type.Q8_0)


@pytest.fixture(scope="module")
def uninterrupted(small, tmp_path_factory):
    """Return the file that one run makes, with scores of its own."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    options = "--tokens", "64", "--scores", f"{folder}/scores.npz", "-o", f"{folder}/x.gguf"
    assert main(["elastic", "prepare", str(small), *options]) == 0
    assert {entry.name for entry in folder.iterdir()} == {"x.gguf", "scores.npz"}
    return folder / "x.gguf"


@pytest.mark.slow
@pytest.mark.parametrize("n_kept", [1, 2, 5, 7, 20])
def test_a_killed_run_goes_on_and_ends_with_the_same_file(
    small, uninterrupted, tmp_path, elastic, n_kept
):
    """It is killed after the text, a window's sums, layers, the uniform file, and some losses."""
    path, scores = tmp_path / "x.gguf", tmp_path / "scores.npz"
    options = "--tokens", 64, "--scores", scores, "-o", path
    command = [sys.executable, "-c", KILLED, n_kept, "elastic", "prepare", small, *options]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (tmp_path / "x.gguf.progress").is_file()
    if path.exists():
        assert set(read_elastic(path).tables) == {"uniform"}
    assert path.exists() == (n_kept > 6)
    code, printed = elastic("prepare", small, *options)
    assert (code, "continuing at step" in printed) == (0, True), printed
    assert path.read_bytes() == uninterrupted.read_bytes()
    assert {entry.name for entry in tmp_path.iterdir()} == {"x.gguf", "scores.npz"}


@pytest.mark.slow
def test_what_was_measured_is_not_measured_again(small, tmp_path, elastic, monkeypatch):
    """A run that was stopped late evaluates no width again that it evaluated before."""
    path = tmp_path / "x.gguf"
    options = "--tokens", 64, "--scores", tmp_path / "scores.npz", "-o", path
    n_measured, measure = [], TextLoss.measure

    def stopped(self):
        n_measured.append(1)
        if len(n_measured) == 40:
            raise KeyboardInterrupt
        return measure(self)

    monkeypatch.setattr(TextLoss, "measure", stopped)
    assert elastic("prepare", small, *options)[0] == 130
    elastic("prepare", small, *options)
    n_all = len(n_measured)
    path.unlink()
    (tmp_path / "scores.npz").unlink()
    n_measured[:] = [1] * 40
    elastic("prepare", small, *options)
    assert n_all == len(n_measured) - 40 + 1 + (40 - 1) % 2  # the stopped one, and its first part


PEAK = """
import pathlib, sys
from llmaas_plugins.cli.main import main
code = main(sys.argv[1:])
status = pathlib.Path("/proc/self/status").read_text()
print("peak", status.split("VmHWM:")[1].split()[0], file=sys.stderr)
sys.exit(code)
"""


def peak_bytes(model, folder):
    """Return the peak memory of a preparation without search."""
    options = "--tokens", "32", "--scores", folder / "scores.npz", "-o", folder / "x.gguf"
    command = [sys.executable, "-c", PEAK, "elastic", "prepare", model, "--no-search", *options]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True)
    return int(done.stderr.split("peak ")[1]) << 10


@pytest.mark.slow
def test_no_float32_copy_of_the_model_is_made(small, tmp_path):
    """Memory grows with the file, and with one layer in float32."""
    shape = Shape(n_layer=12, n_embd=256, n_head=4, n_head_kv=2, n_ff=3072, n_ctx=512)
    model = write_random_model(tmp_path / "model.gguf", shape, Type.Q8_0)
    n_bytes, layer = model.stat().st_size, 4 * 256 * (3 * 3072 + 3 * 256)
    for folder in ("few", "many"):
        (tmp_path / folder).mkdir()
    more = peak_bytes(model, tmp_path / "many") - peak_bytes(small, tmp_path / "few")
    of_float32 = 4 * n_bytes * 32 / 34
    assert n_bytes / 4 < more < n_bytes + layer + (24 << 20) < of_float32


@pytest.mark.slow
def test_another_model_begins_anew(small, original, tmp_path, elastic, monkeypatch):
    path, scores = tmp_path / "x.gguf", tmp_path / "scores.npz"
    options = "--tokens", 64, "--scores", scores, "-o", path
    monkeypatch.setattr(elastic_preparing, "searched", lambda *_: os.kill(os.getpid(), 15))
    assert elastic("prepare", small, *options)[0] == 143
    monkeypatch.undo()
    scores.unlink()
    code, printed = elastic("prepare", original, *options, "--no-search")
    assert (code, "continuing" in printed) == (0, False)
    assert blocks_of(path) == blocks_of(original)


@pytest.mark.slow
def test_steps_are_announced_and_a_dry_run_writes_nothing(original, tmp_path, elastic):
    path = tmp_path / "x.gguf"
    options = "--tokens", 64, "--scores", tmp_path / "scores.npz", "-o", path
    code, printed = elastic("prepare", original, *options, "--dry-run")
    lines = printed.splitlines()
    assert (code, list(tmp_path.iterdir())) == (0, [])
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split(":")[0] for line in steps] == [f"step {n} of 5" for n in range(1, 6)]
    assert all(" about " in line for line in steps)
    assert "measured" in printed or "estimated from a probe" in printed
    assert any(line.startswith("memory: ") and "disk: " in line for line in lines)
    code, printed = elastic("prepare", original, *options, "--dry-run", "--json")
    report = json.loads(printed)
    assert len(report["steps"]) == 5
    assert min(step["seconds"] for step in report["steps"]) > 0
    assert report["disk_bytes"] == 2 * original.stat().st_size
    code, printed = elastic("prepare", original, *options, "--no-search", "--json")
    report = json.loads(printed)
    assert (report["path"], report["n_bytes"]) == (str(path), path.stat().st_size)
    assert list(report["tables"]) == ["uniform"]
