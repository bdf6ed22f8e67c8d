"""Temporary folders that killed processes leave are removed later, and no others."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest

from llmaas_hooks import StoreError
from llmaas_plugins.files import temporary_folder
from llmaas_plugins.files.temporary_folder import folder_beside, folder_lock, locked_folder

LEFT = """
import os, sys
from pathlib import Path
from llmaas_plugins.files.temporary_folder import folder_beside
with folder_beside(Path(sys.argv[1])) as folder:
    (folder / "quantized.gguf").write_text("weights")
    print(folder.name, flush=True)
    os.kill(os.getpid(), 9)
"""


def test_what_a_killed_process_left_is_removed_by_the_next_one(tmp_path):
    command = [sys.executable, "-c", LEFT, str(tmp_path / "model.gguf")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    (left,) = tmp_path.iterdir()
    assert left.name == done.stdout.strip()
    left.with_name(f"{left.name[:-8]}abcdefgh").mkdir()  # it was killed before it wrote anything
    with folder_beside(tmp_path / "another.gguf") as folder:
        assert [*tmp_path.iterdir()] == [folder] != [left]
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("has_file", [True, False])
def test_folders_in_use_and_those_of_the_user_stay(tmp_path, has_file):
    (tmp_path / ".llmaas-x-of a user" / "sub").mkdir(parents=True)
    (tmp_path / ".llmaas-x-abcdefgh").write_text("a file")
    theirs = {*tmp_path.iterdir()}
    with locked_folder(tmp_path, ".llmaas-x-") as folder:
        if has_file:
            (folder / "chats").write_text("texts")
        with locked_folder(tmp_path, ".llmaas-x-") as other:
            assert {*tmp_path.iterdir()} == {folder, other, *theirs}
    assert {*tmp_path.iterdir()} == theirs


def test_a_folder_that_is_taken_for_one_that_was_left_is_made_again(tmp_path, monkeypatch):
    taken = []

    @contextlib.contextmanager
    def late(folder):
        """Lock a folder, the first one once another process has removed it."""
        if not taken:
            taken.append(folder)
            with locked_folder(tmp_path, ".llmaas-x-"):
                assert not folder.exists()
        with folder_lock(folder) as is_held:
            yield is_held

    monkeypatch.setattr(temporary_folder, "folder_lock", late)
    with locked_folder(tmp_path, ".llmaas-x-") as folder:
        assert [*tmp_path.iterdir()] == [folder]
        assert folder not in taken
    assert [*tmp_path.iterdir()] == []


def test_a_folder_that_cannot_be_made(tmp_path):
    with (
        pytest.raises(StoreError, match=r"cannot write beside .*x: No such file.* Do that\."),
        folder_beside(tmp_path / "none" / "x", " Do that."),
    ):
        pass
