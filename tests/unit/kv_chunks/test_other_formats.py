"""Stores of other formats: refused, and left as they are."""

from __future__ import annotations

import sqlite3
import struct

import pytest
from damages import files, overwrite
from kv_stores import edit, open_store

from llmaas_hooks import StoreError
from llmaas_plugins.kv_chunks.store.store_format import FORMAT

VOLATILE = {"lock", "index.sqlite-shm"}


def header_of(version):
    return lambda kv: overwrite(kv / "chunks.slab", 8, struct.pack("<I", version))


def index_of(version):
    return lambda kv: edit(kv, f"PRAGMA user_version={version}")


def log_of_newer_index(kv):
    """The writing process was killed, so the version is in the log only."""
    db = sqlite3.connect(kv / "index.sqlite")
    db.execute("CREATE TABLE more (id BLOB)")
    db.execute(f"PRAGMA user_version={FORMAT + 1}")
    db.commit()
    kept = {path: path.read_bytes() for path in kv.glob("index.sqlite*")}
    db.close()
    for path, content in kept.items():
        path.write_bytes(content)
    (kv / "index.sqlite-shm").unlink()


OTHER_FORMATS = {
    "newer slab": (FORMAT + 1, header_of(FORMAT + 1)),
    "much newer slab": (77, header_of(77)),
    "older slab": (FORMAT - 1, header_of(FORMAT - 1)),
    "newer index": (FORMAT + 1, index_of(FORMAT + 1)),
    "older index": (FORMAT - 1, index_of(FORMAT - 1)),
    "newer index in the log": (FORMAT + 1, log_of_newer_index),
    "foreign index": (0, lambda kv: edit(kv, "PRAGMA user_version=0", "CREATE TABLE x (y)")),
}


@pytest.mark.parametrize(("found", "change"), OTHER_FORMATS.values(), ids=OTHER_FORMATS)
def test_store_of_another_format_is_refused_and_left_as_it_is(kv, found, change):
    change(kv)
    before = files(kv, but=VOLATILE)
    for _ in range(2):
        with pytest.raises(StoreError, match=r"nothing was changed\. Use the vers") as caught:
            open_store(kv)
        assert (
            f"has format {found}, but this version of llmaas_plugins reads format {FORMAT}"
            in str(caught.value)
        )
    assert files(kv, but=VOLATILE) == before
