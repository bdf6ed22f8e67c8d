"""Thousands of damaged stores: each opens or is set aside, and none returns wrong cells."""

from __future__ import annotations

import collections
import logging
import shutil

import numpy as np
import pytest
import store_life
from soak import scale

from llmaas_hooks import StoreError
from llmaas_plugins.kv_chunks.maintenance.checking import check_store

STORES = scale(120, 1000)
"""Stores in one part of the run."""
FILES = ("chunks.slab", "index.sqlite", "index.sqlite-wal", "index.sqlite-shm")


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Return the files of a store that was closed, and of a store whose process was killed."""
    directory = tmp_path_factory.mktemp("original") / "kv"
    store = store_life.open_store(directory)
    store.set_layout(store_life.ROOT, '{"n_layer": 1}')
    store_life.save(store, store_life.A, "a")
    store_life.save_planes(store, store_life.G, "g")
    store.flush()
    store_life.cut(store, store_life.G, 3)
    store.close()
    closed = read(directory)
    store = store_life.open_store(directory)
    store_life.save(store, store_life.B, "b")
    store.flush()
    store_life.save_planes(store, store_life.H, "h")
    store.flush()
    store_life.cut(store, store_life.H, 5)
    store.flush()
    killed = read(directory)
    store.close()
    assert killed["index.sqlite-wal"]
    return closed, killed


def read(directory):
    return {name: (directory / name).read_bytes() for name in FILES if (directory / name).is_file()}


# -- what can happen to a file -------------------------------------------------------------------


def flipped(rng, data, other):
    for at in rng.integers(0, len(data), rng.integers(1, 9)):
        data[at] ^= 1 << rng.integers(8)


def garbled(rng, data, other):
    at, n = rng.integers(0, len(data)), int(rng.choice([1, 16, 512, 4096]))
    data[at : at + n] = rng.bytes(len(data[at : at + n]))


def zeroed(rng, data, other):
    n = int(rng.choice([512, 4096, 16384]))
    at = rng.integers(0, len(data)) // n * n
    data[at : at + n] = bytes(len(data[at : at + n]))


def shortened(rng, data, other):
    at = rng.integers(0, len(data))
    del data[at if rng.random() < 0.5 else at // 512 * 512 :]


def lengthened(rng, data, other):
    data += rng.bytes(int(rng.choice([1, 4096, 50_000])))


def swapped_inside(rng, data, other):
    n = int(rng.choice([512, 4096]))
    a, b = (int(at) // n * n for at in rng.integers(0, len(data), 2))
    if max(a, b) + n <= len(data):
        data[a : a + n], data[b : b + n] = data[b : b + n], data[a : a + n]


def mixed_up(rng, data, other):
    n = int(rng.choice([512, 4096]))
    a, b = (int(rng.integers(0, len(one))) // n * n for one in (data, other))
    data[a : a + n] = other[b : b + n]


def replaced(rng, data, other):
    data[:] = other


def header_hit(rng, data, other):
    for at in rng.integers(0, min(100, len(data)), 2):
        data[at] = rng.integers(256)


HARMS = (
    flipped, garbled, zeroed, shortened, lengthened, swapped_inside, mixed_up, replaced, header_hit
)  # fmt: skip


def harm(rng, files):
    """Damage one file, rarely two; rarely delete the file."""
    names = [name for name in files if files[name]]
    for _ in range(rng.choice([1, 1, 1, 2])):
        name, other = rng.choice(names, 2)
        if rng.random() < 0.02:
            files.pop(name, None)
        elif files.get(name):
            data = bytearray(files[name])
            rng.choice(HARMS)(rng, data, files.get(other, b"x" * 4096) or b"x" * 4096)
            files[name] = bytes(data)


def outcome(directory, look_first):
    """Return the damaged store's outcome; store_life.load raises if a payload is wrong."""
    try:
        is_sound = look_first and not check_store(directory).problems
        store = store_life.open_store(directory)
    except StoreError as error:
        if "nothing was changed. Use the version that wrote it" in str(error):
            return "another format"
        if "there is no KV store" not in str(error):
            raise
        return "no index"
    there = store_life.load(store, list(store.tree))
    assert not is_sound or store.stats()["faults"] == 0
    set_aside = (directory / "index.sqlite.unusable").exists()
    store_life.save(store, store_life.E, "e")
    store.flush()
    path, n_tokens = store.match(store_life.ROOT, store_life.E)
    assert n_tokens == len(store_life.E)
    assert len(store_life.load(store, path)) == len(path)
    assert (directory / "chunks.slab").stat().st_size <= store_life.DISK
    store.close()
    if set_aside:
        return "set aside"
    return "whole" if len(there) >= 5 else "part of it lost"


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("part", range(scale(1, 20)))
def test_damaged_stores_give_no_wrong_cells_and_go_on(originals, tmp_path, part):
    logging.getLogger("llmaas").setLevel(logging.CRITICAL)
    seen = collections.Counter()
    try:
        for seed in range(part * STORES, (part + 1) * STORES):
            rng = np.random.default_rng(seed)
            directory = tmp_path / "kv"
            directory.mkdir(mode=0o700)
            files = dict(originals[seed % 2])
            harm(rng, files)
            for name, data in files.items():
                (directory / name).write_bytes(data)
            try:
                seen[outcome(directory, look_first=seed % 3 == 0)] += 1
            except Exception as error:
                pytest.fail(f"store {seed}: {error!r}")
            shutil.rmtree(directory)
    finally:
        logging.getLogger("llmaas").setLevel(logging.NOTSET)
    assert {"whole", "part of it lost", "set aside"} <= set(seen)
