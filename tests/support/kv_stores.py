"""A small KV store of two contexts with a common beginning, and checks of what it returns."""

from __future__ import annotations

import contextlib
import ctypes
import sqlite3
import sys

import fork_server
import numpy as np
import stored_chunks
from damages import files, overwrite
from stored_chunks import payload

from llmaas_plugins._native import Budget, KVGeometry
from llmaas_plugins.kv_chunks.store.chunk_ids import chain
from llmaas_plugins.kv_chunks.store.chunk_store import ChunkStore
from llmaas_plugins.kv_chunks.store.disk_store import DiskStore
from llmaas_plugins.kv_chunks.store.extents import PAGE

ROOT = b"r" * 32
GEOM = KVGeometry(1, False, 1, 1, (64,), (64,))
"""Geometry with which a chunk takes one page."""
BUDGET = 1 << 20
A = np.arange(16 * 6 + 5, dtype=np.int32)
"""Tokens of 7 chunks."""
B = np.concatenate([A[:32], np.arange(500, 548, dtype=np.int32)])
"""Tokens of 2 chunks of A and 3 more."""
OTHER_MODEL = b"o" * 32
C = np.arange(900, 932, dtype=np.int32)
"""Tokens of 2 chunks of another model."""
FILES = ("lock", "chunks.slab", "index.sqlite", "index.sqlite-wal", "index.sqlite-shm")
OPEN = """
import os, sys
from pathlib import Path
from llmaas_hooks import StoreError
from llmaas_plugins.kv_chunks.store.disk_store import DiskStore
if os.geteuid() == 0 and "drop" in sys.argv:
    os.setgroups([])
    os.setuid(65534)
try:
    DiskStore(Path(sys.argv[1]), 1 << 20)
except StoreError as error:
    print(error)
    sys.exit(3)
print("opened")
"""
"""Script that opens the store of its first argument, as another user if the second is "drop"."""


def open_store(directory):
    """Open a store of 1 MiB."""
    return ChunkStore(Budget(BUDGET), DiskStore(directory, BUDGET))


def save(store, tokens, name=None, root=ROOT):
    """Put a whole context."""
    stored_chunks.put(store, GEOM, chain(root, tokens), name)


def write_store(directory):
    """Write the store of the contexts "a" and "b", close it, and return its directory."""
    store = open_store(directory)
    store.set_layout(ROOT, '{"n_layer": 1}')
    save(store, A, "a")
    save(store, B, "b")
    store.close()
    return directory


def load(store, tokens, root=ROOT):
    """Return the number of tokens in loaded chunks; assert that these are correct."""
    path, n_tokens = store.match(root, tokens)
    assert path == [] or path[-1].id in chain(root, tokens[: sum(c.n_tokens for c in path)])
    addresses = store.reader.fetch(path)
    ready = path[: len(addresses)]
    for chunk, address in zip(ready, addresses, strict=True):
        assert ctypes.string_at(address, chunk.size) == payload(GEOM, chunk.id)
    store.reader.unpin(ready)
    return min(n_tokens, sum(chunk.n_tokens for chunk in ready))


def assert_works(directory):
    """Assert that the store still takes and keeps new contexts."""
    store = open_store(directory)
    for _ in range(4):  # later damage shows only once the damage before it is repaired
        load(store, A)
        load(store, B)
        save(store, A, "a")
        save(store, B, "b")
    assert (load(store, A), load(store, B)) == (len(A), len(B))
    store.close()
    store = open_store(directory)
    assert (load(store, A), load(store, B)) == (len(A), len(B))
    assert set(store.tree.contexts()) >= {"a", "b"}
    assert store.stats()["faults"] == 0
    store.close()


def n_loaded(directory, root, tokens):
    """Open the store, and return the number of tokens of a context that it gives back."""
    store = open_store(directory)
    n_tokens = load(store, tokens, root)
    store.close()
    return n_tokens


def damage_chunk(directory, root, tokens, i):
    """Change two bytes of a context's chunk ``i`` in the slab."""
    with contextlib.closing(sqlite3.connect(directory / "index.sqlite")) as db:
        found = db.execute("SELECT offset FROM chunks WHERE key=?", (chain(root, tokens)[i].key,))
        (offset,) = found.fetchone()
    overwrite(directory / "chunks.slab", PAGE + offset + 300, b"\xa5\x5a")


def edit(directory, *statements):
    """Change the index, with statements or with pairs of a statement and its values."""
    db = sqlite3.connect(directory / "index.sqlite")
    for statement in statements:
        db.execute(*statement) if isinstance(statement, tuple) else db.execute(statement)
    db.commit()
    db.close()


def on_disk(directory):
    """Return all bytes of a folder's files."""
    return b"".join(files(directory).values())


def loaded(directory):
    """Open the store, and return the number of tokens of A and of B that it gives back."""
    store = open_store(directory)
    found = load(store, A), load(store, B)
    store.close()
    return found


def assert_miss(directory):
    """Assert that an unusable store opens as an empty one, which then works."""
    store = open_store(directory)
    assert (load(store, A), load(store, B), len(store.tree)) == (0, 0, 0)
    assert store.stats()["contexts"] == 0
    store.close()
    assert_works(directory)


def run(script, *args, cwd=None):
    """Run a script in another process."""
    command = [sys.executable, "-c", script, *map(str, args)]
    return fork_server.run(command, cwd=cwd, capture_output=True, text=True, timeout=30)
