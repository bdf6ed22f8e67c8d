"""Batched file I/O and byte budgets through the Python wrapper."""

from __future__ import annotations

import errno
import os
import threading

import numpy as np
import pytest

from llmaas_hooks.errors import BudgetError, StoreError
from llmaas_plugins._native import (
    STORE_BLOCK,
    Budget,
    Codec,
    KVGeometry,
    NativeError,
    Status,
    blob_init,
    blob_size,
    chunk_bound,
    chunk_encode,
    store_erase,
    store_read,
    store_write,
)

GEOM = KVGeometry(2, False, 1, 1, (512, 512), (512, 512))


@pytest.fixture
def slab(tmp_path):
    fd = os.open(tmp_path / "chunks.slab", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def make_chunks(n):
    blob = np.random.default_rng(0).integers(0, 255, blob_size(GEOM, 16), np.uint8)
    blob_init(GEOM, blob, list(range(16)))
    chunks, keys = [], [bytes([i]) * 32 for i in range(n)]
    for i, key in enumerate(keys):
        out = bytearray(chunk_bound(GEOM, Codec.RAW, 1 + i % 16))
        chunk_encode(GEOM, Codec.RAW, blob, 16, 0, 1 + i % 16, key, out)
        chunks.append(bytes(out))
    return chunks, keys


def layout(chunks):
    offsets, at = [], 0
    for chunk in chunks:
        offsets.append(at)
        at += -(-len(chunk) // STORE_BLOCK) * STORE_BLOCK
    return offsets, [len(chunk) for chunk in chunks], at


def aligned(n_bytes):
    whole = np.zeros(n_bytes + STORE_BLOCK, np.uint8)
    start = -whole.ctypes.data % STORE_BLOCK
    return whole[start : start + n_bytes]


def write_all(fd, chunks):
    offsets, lengths, total = layout(chunks)
    source = aligned(total)
    for offset, chunk in zip(offsets, chunks, strict=True):
        source[offset : offset + len(chunk)] = np.frombuffer(chunk, np.uint8)
    addresses = [source.ctypes.data + offset for offset in offsets]
    assert store_write(fd, offsets, lengths, addresses) == total
    return offsets, lengths, total


def read_all(fd, offsets, lengths, keys, total):
    target = aligned(total)
    addresses = [target.ctypes.data + offset for offset in offsets]
    statuses = store_read(fd, offsets, lengths, addresses, keys)
    parts = zip(offsets, lengths, strict=True)
    return statuses, [target[offset : offset + length].tobytes() for offset, length in parts]


def test_chunks_survive_the_file(slab):
    chunks, keys = make_chunks(40)
    offsets, lengths, total = write_all(slab, chunks)
    assert os.fstat(slab).st_size == total
    statuses, back = read_all(slab, offsets, lengths, keys, total)
    assert statuses == [Status.OK] * 40
    assert back == chunks


def test_each_extent_has_its_own_status(slab):
    chunks, keys = make_chunks(6)
    offsets, lengths, total = write_all(slab, chunks)
    os.pwrite(slab, b"\xff\x00\xff", offsets[1] + 200)
    keys[2] = bytes(32)
    os.ftruncate(slab, offsets[5])
    statuses, _ = read_all(slab, offsets, lengths, keys, total)
    assert statuses == [
        Status.OK, Status.ECORRUPT, Status.ESTALE, Status.OK, Status.OK, Status.EIO,
    ]  # fmt: skip


@pytest.mark.parametrize("n_gap_blocks", [0, 1, 6, 7])
@pytest.mark.parametrize("flag", [0, getattr(os, "O_DIRECT", 0)], ids=["cached", "direct"])
def test_chunks_are_read_over_gaps_and_in_any_order(tmp_path, n_gap_blocks, flag):
    """Bytes in the gaps are not copied anywhere."""
    path, (chunks, keys) = tmp_path / "gaps.slab", make_chunks(30)
    whole = [-(-len(chunk) // STORE_BLOCK) * STORE_BLOCK for chunk in chunks]
    starts = [sum(whole[:i]) + i * n_gap_blocks * STORE_BLOCK for i in range(31)]
    foreign = np.full(starts[-1], 0xEE, np.uint8)
    for start, chunk in zip(starts, chunks, strict=False):
        foreign[start : start + len(chunk)] = np.frombuffer(chunk, np.uint8)
    path.write_bytes(foreign.tobytes())
    order = np.random.default_rng(2).permutation(30).tolist()
    target = aligned(sum(whole))
    places = {i: sum(whole[j] for j in order[:at]) for at, i in enumerate(order)}
    try:
        fd = os.open(path, os.O_RDONLY | flag)
    except OSError:
        pytest.skip("this file system has no O_DIRECT")
    try:
        addresses = [target.ctypes.data + places[i] for i in order]
        offsets, lengths = [starts[i] for i in order], [len(chunks[i]) for i in order]
        statuses = store_read(fd, offsets, lengths, addresses, [keys[i] for i in order])
    finally:
        os.close(fd)
    assert statuses == [Status.OK] * 30
    for i, chunk in enumerate(chunks):
        assert target[places[i] : places[i] + len(chunk)].tobytes() == chunk


def test_failed_write_carries_its_errno():
    full, source = os.open("/dev/full", os.O_WRONLY), aligned(STORE_BLOCK)
    try:
        with pytest.raises(StoreError, match="No space left") as caught:
            store_write(full, [0], [3], [source.ctypes.data])
    finally:
        os.close(full)
    assert caught.value.errno == errno.ENOSPC


def test_bad_extents_are_refused(slab):
    source = aligned(2 * STORE_BLOCK).ctypes.data
    with pytest.raises(NativeError, match="multiples of 4096"):
        store_write(slab, [100], [3], [source])
    with pytest.raises(NativeError, match="multiples of 4096"):
        store_write(slab, [0], [3], [source + 8])
    with pytest.raises(NativeError, match="differ in number"):
        store_write(slab, [0], [], [source])
    with pytest.raises(NativeError, match="differ in number"):
        store_read(slab, [0], [1], [1], [])
    with pytest.raises(NativeError, match="keys of 3 bytes"):
        store_read(slab, [0], [1], [1], [b"abc"])
    assert store_read(slab, [], [], [], []) == []


def test_budget_refuses_and_changes_nothing():
    budget = Budget(100)
    budget.reserve(60)
    with pytest.raises(BudgetError, match="41 bytes requested, 40 of 100 available"):
        budget.reserve(41)
    assert budget.try_reserve(40)
    assert not budget.try_reserve(1)
    budget.limit = 10
    assert (budget.used, budget.peak, budget.limit) == (100, 100, 10)
    budget.release(100)
    with pytest.raises(NativeError, match="release of 1 bytes, 0 are used"):
        budget.release(1)


def test_budget_holds_under_threads():
    budget, excess = Budget(10), []

    def work():
        for n in range(1, 2000):
            if budget.try_reserve(n % 7):
                if budget.used > 10:
                    excess.append(budget.used)
                budget.release(n % 7)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert budget.used == 0
    assert budget.peak <= 10
    assert not excess


def test_erased_extents_read_as_zeros_and_the_rest_stays(slab):
    chunks, _ = make_chunks(3)
    offsets, lengths, total = write_all(slab, chunks)
    n_bytes = store_erase(slab, [offsets[1]], [lengths[1]])
    assert n_bytes == offsets[2] - offsets[1]
    assert os.pread(slab, n_bytes, offsets[1]) == bytes(n_bytes)
    for i in (0, 2):
        assert os.pread(slab, lengths[i], offsets[i]) == chunks[i]
    assert os.fstat(slab).st_size == total
    assert os.fstat(slab).st_blocks * 512 < total or os.statvfs(slab).f_bsize > STORE_BLOCK
    assert store_erase(slab, [], []) == 0


def test_erasing_that_fails_carries_its_errno(slab):
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(StoreError, match="erasing stopped after 0 bytes: No space") as caught:
            store_erase(full, [0], [3])
    finally:
        os.close(full)
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(NativeError, match="multiples of 4096"):
        store_erase(slab, [100], [3])
    with pytest.raises(NativeError, match="differ in number"):
        store_erase(slab, [0], [])
