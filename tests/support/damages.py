"""Damages to a file, for the tests of every format: tables of names and functions.

Each function damages the file at a path. A test runs with each row of a table (``each``), and a
format adds rows of its own.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest


def each(table, *, but=()):
    """Run a test once with each row of a table, as the argument ``damage``."""
    names = [name for name in table if name not in but]
    return pytest.mark.parametrize("damage", [table[name] for name in names], ids=names)


def each_told(tables, *, but=()):
    """Run a test with each row of several tables; a table's key is the argument ``message``."""
    rows = {
        name: (damage, message)
        for message, table in tables.items()
        for name, damage in table.items()
        if name not in but
    }
    return pytest.mark.parametrize(("damage", "message"), rows.values(), ids=rows)


def content(data):
    """Return a damage that replaces the whole content."""
    return lambda path: path.write_bytes(data)


FOREIGN = {
    "empty": content(b""),
    "one byte": content(b"x"),
    "zeros": content(bytes(36_864)),
    "ones": content(b"\xff" * 200_000),
    "text": content(b"garbage" * 999),
    "noise": content(np.random.default_rng(0).bytes(10_000)),
}
"""Contents that no format has."""


def link(path):
    """Move the file away, and put a link to it in its place."""
    path.touch()
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _instead(make):
    def replace(path):
        path.unlink(missing_ok=True)
        make(path)

    return replace


LINKS = {"link": link, "dangling link": _instead(lambda path: path.symlink_to("nowhere"))}
ODD = {"pipe": _instead(os.mkfifo), "folder": _instead(os.mkdir)}
"""Things that are no files; whoever opens the pipe must not wait for its other end."""
NO_FILES = {**LINKS, **ODD, "missing": Path.unlink}


def overwrite(path, at, data):
    """Replace bytes in place."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def flip(path, at):
    """Flip one bit of the byte at ``at``; a second call flips it back."""
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << at % 8]))


def flips(path, places):
    """Yield each place while its bit is flipped, and no other."""
    for at in places:
        flip(path, at)
        yield at
        flip(path, at)


def cuts(path, sizes):
    """Yield each size, negative ones from the end, while the file is cut or filled up to it."""
    whole = path.read_bytes()
    for size in sizes:
        path.write_bytes(whole[:size].ljust(size, b"\0"))
        yield size
    path.write_bytes(whole)


def flip_at_random(path, seed, n, *, first=0):
    """Flip bits of ``n`` bytes that are not zero, from the offset ``first`` on."""
    used = first + np.flatnonzero(np.fromfile(path, np.uint8)[first:])
    for at in np.random.default_rng(seed).choice(used, n, replace=False):
        flip(path, int(at))


def files(directory, *, but=()):
    """Return the content of each file in a folder, to tell whether any has changed."""
    paths = (path for path in directory.iterdir() if path.name not in but and path.is_file())
    return {path.name: path.read_bytes() for path in paths}
