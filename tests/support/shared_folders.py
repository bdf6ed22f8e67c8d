"""Folders that are filled once for all test workers, with files that tests only read."""

from __future__ import annotations

import fcntl
import os
import shutil


def base_of(tmp_path_factory):
    """Return the temporary directory that all test workers share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def shared_folder(base, name, fill):
    """Return the folder ``name``. The first caller makes it with ``fill(folder)``.

    Tests must not change its files. A test that does so copies them first.
    """
    folder = base / "shared" / name
    folder.parent.mkdir(exist_ok=True)
    with folder.with_name(f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            unfinished = folder.with_name(f"{name}.new")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            fill(unfinished)
            unfinished.rename(folder)
    return folder
