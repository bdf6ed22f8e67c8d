"""Checkpoints: results come back as they were, or not at all."""

from __future__ import annotations

import zipfile

import numpy as np
import pytest

from llmaas_plugins.elastic import checkpoint as module
from llmaas_plugins.elastic.checkpoint import Checkpoint, checkpoint_path, fingerprint_of

RESULTS = {"losses": np.array([0.1, 1 / 3, -2e-17]), "sums": np.arange(6).reshape(2, 3)}
KEY = fingerprint_of({"model": "a"})


@pytest.fixture
def path(tmp_path):
    path = checkpoint_path(tmp_path / "model.gguf")
    checkpoint = Checkpoint(path, KEY)
    checkpoint.keep(RESULTS)
    checkpoint.save()
    return path


def test_results_come_back_exactly(path):
    found = Checkpoint(path, KEY)
    assert bool(found)
    for name, array in RESULTS.items():
        np.testing.assert_array_equal(found.get(name), array)
        assert found.get(name).dtype == array.dtype
    assert found.get("other") is None
    assert [entry.name for entry in path.parent.iterdir()] == ["model.gguf.progress"]


def test_results_of_something_else_are_none(path):
    assert not Checkpoint(path, fingerprint_of({"model": "b"}))
    assert not Checkpoint(path.with_name("missing"), KEY)


def test_each_damaged_byte_leaves_results_or_none(path):
    content = path.read_bytes()
    for at in range(0, len(content), 7):
        path.write_bytes(content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :])
        found = Checkpoint(path, KEY)
        for name in RESULTS if found else ():
            np.testing.assert_array_equal(found.get(name), RESULTS[name])
    for n in range(0, len(content), 11):
        path.write_bytes(content[:n])
        assert not Checkpoint(path, KEY)


def test_objects_and_large_files_are_not_read(path, monkeypatch):
    with path.open("wb") as file:
        np.savez(file, about=np.zeros(1, np.uint8), losses=np.array([None]))
    assert not Checkpoint(path, KEY)
    monkeypatch.setattr(module, "_MOST_BYTES", 10_000)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("losses.npy", bytes(1 << 20))
    monkeypatch.setattr(np, "load", lambda *_, **__: pytest.fail("the file was unpacked"))
    assert not Checkpoint(path, KEY)


def test_results_are_written_after_some_time_and_when_asked(tmp_path, monkeypatch):
    path = tmp_path / "progress"
    checkpoint = Checkpoint(path, KEY)
    checkpoint.keep(RESULTS)
    assert not path.exists()
    monkeypatch.setattr(module, "_EVERY_S", 0.0)
    checkpoint.keep({"losses": np.zeros(1)})
    assert Checkpoint(path, KEY).get("losses").tolist() == [0.0]
    checkpoint.remove()
    checkpoint.save()
    assert not checkpoint
    assert not list(tmp_path.iterdir())
