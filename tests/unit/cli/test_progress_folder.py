"""Folder for the progress of a long command: one run at a time, and no files left behind."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pytest

from llmaas_hooks import StoreError
from llmaas_plugins.cli import progress_folder as module
from llmaas_plugins.cli.flash.sharing import shares_path
from llmaas_plugins.cli.progress_folder import progress_folder, remove_progress


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "model.gguf.recovery"


@pytest.mark.parametrize(
    ("others", "left"),
    [
        ([], None),
        (["text-16.progress"], {"text-16.progress"}),
        (["notes.txt"], {"notes.txt"}),
        (["b.npz"], {"b.npz", "text-8.progress"}),
    ],
)
def test_a_complete_run_removes_its_own_files_only(folder, others, left):
    text = folder / "text-8.progress"
    with progress_folder(folder):
        for path in (folder / "a.npz", text, *(folder / name for name in others)):
            path.touch()
        remove_progress(folder, [folder / "a.npz", folder / "none"], [text])
    found = {each.name for each in folder.iterdir()} if folder.exists() else None
    assert found == left


def test_a_second_run_is_refused_and_the_first_keeps_its_folder(folder):
    with progress_folder(folder):
        with (
            pytest.raises(StoreError, match=r"another run uses .*model\.gguf\.recovery: wait"),
            progress_folder(folder),
        ):
            pytest.fail("two runs have one folder")
        (folder / "a.npz").touch()
    with progress_folder(folder):
        assert (folder / "a.npz").exists()


def test_a_run_that_fails_leaves_no_empty_folder(folder):
    with pytest.raises(KeyboardInterrupt), progress_folder(folder):
        raise KeyboardInterrupt
    assert not folder.exists()


@pytest.mark.parametrize("removed", ["before it is opened", "before it is locked"])
def test_a_run_that_ends_may_remove_the_folder_of_one_that_begins(folder, monkeypatch, removed):
    original_open, original_lock, removals = os.open, module.try_lock, []

    def remove():
        if not removals:
            removals.append(folder)
            shutil.rmtree(folder)

    def opened(path, flags, *args, **kwargs):
        if path == folder and removed == "before it is opened":
            remove()
        return original_open(path, flags, *args, **kwargs)

    def locked(fd):
        if removed == "before it is locked":
            remove()
        return original_lock(fd)

    monkeypatch.setattr(module.os, "open", opened)
    monkeypatch.setattr(module, "try_lock", locked)
    with progress_folder(folder):
        (folder / "a.npz").touch()
    assert removals
    assert (folder / "a.npz").exists()


def test_a_file_in_the_folders_place_is_named(folder):
    folder.touch()
    with (
        pytest.raises(StoreError, match=r"cannot make .*model\.gguf\.recovery"),
        progress_folder(folder),
    ):
        pytest.fail("a file is no folder")


def test_shares_of_two_texts_have_two_files(folder):
    one, other = np.arange(4, dtype=np.int32), np.arange(1, 5, dtype=np.int32)
    assert shares_path(folder, [one]) == shares_path(folder, [one.copy()])
    assert shares_path(folder, [one]) != shares_path(folder, [other])
    assert shares_path(folder, [one]).suffix == ".progress"
