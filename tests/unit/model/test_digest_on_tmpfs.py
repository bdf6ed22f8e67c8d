"""Digests of files on tmpfs, where a write through a memory map changes none of a file's times."""

from __future__ import annotations

import mmap
import tempfile
from pathlib import Path

import pytest

from llmaas_plugins.files import digest_cache
from llmaas_plugins.files.file_times import records_mapped_writes
from llmaas_plugins.model import digest as model_digest
from llmaas_plugins.model.digest import file_digest, files_now

TMPFS = Path("/dev/shm")


@pytest.fixture
def path(monkeypatch, tmp_path):
    """Yield the path of a file on tmpfs whose times are old enough to be trusted elsewhere."""
    if records_mapped_writes(TMPFS):
        pytest.skip(f"{TMPFS} is no tmpfs here; mount one to run this test")
    monkeypatch.setattr(model_digest, "_SETTLED_NS", -(1 << 62))
    monkeypatch.setattr(model_digest, "_known", {})
    monkeypatch.setattr(digest_cache, "_directory", lambda: tmp_path / "cache")
    with tempfile.TemporaryDirectory(dir=TMPFS) as folder:
        path = Path(folder) / "model.gguf"
        path.write_bytes(bytes(range(256)))
        yield path


def test_an_edit_that_leaves_no_time_changes_the_digest(path):
    files, found = files_now(path), file_digest(path)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
        content[7] ^= 1
    assert files_now(path) == files
    assert file_digest(path) != found
    assert model_digest._known == {}
    assert not digest_cache._directory().exists()


def test_other_file_systems_and_missing_files_are_trusted(tmp_path):
    assert records_mapped_writes("/proc/self/stat")
    assert records_mapped_writes(tmp_path / "missing")
