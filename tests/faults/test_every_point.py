"""One fault at each file operation of a store's life: the survivors never yield wrong data."""

from __future__ import annotations

import pytest
from soak import scale

FAULTS = [
    "ENOSPC",
    "EIO",
    "EDQUOT",
    "full from then on",
    "broken from then on",
    "no holes",
    "short",
    "torn between blocks",
    "torn anywhere",
    "killed before",
    "killed after",
    "power cut",
    "power cut, some written",
]
SOME = ["EIO", "torn anywhere", "killed after", "power cut, some written"]
REACHED = {  # every file of a store, and every operation on each
    "pwritev chunks.slab",
    "preadv chunks.slab",
    "pwrite chunks.slab",
    "ftruncate chunks.slab",
    "fallocate chunks.slab",
    "sync chunks.slab",
    "open index.sqlite",
    "pread index.sqlite",
    "pwrite index.sqlite",
    "sync index.sqlite",
    "pwrite index.sqlite-wal",
    "pread index.sqlite-wal",
    "sync index.sqlite-wal",
    "ftruncate index.sqlite-wal",
    "unlink index.sqlite-wal",
    "pwrite index.sqlite-shm",
    "ftruncate index.sqlite-shm",
    "open lock",
    "pwrite lock",
}
REACHED_OF_AN_ARCHIVE = {
    "preadv 000000.0.segment",
    "pwrite 000000.0.segment",
    "ftruncate 000000.0.segment",
    "sync 000000.0.segment",
    "unlink 000000.0.segment",
    "pwrite 000000.1.segment.partial",
    "sync 000000.1.segment.partial",
    "rename 000000.1.segment.partial",
    "rename 000000.1.segment",
    "pwrite 000000.1.segment.dropped",
    "open lock",
}
REACHED_OF_A_DATASTORE = {
    "preadv datastore.knn",
    "preadv2 datastore.knn",
    "pwrite datastore.knn.partial",
    "sync datastore.knn.partial",
    "rename datastore.knn.partial",
    "pwrite datastore.knn.dropped",
    "sync datastore.knn.dropped",
    "unlink datastore.knn.dropped",
}


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_at_every_operation_of_a_life(run_preloaded, tmp_path, fault):
    """The life continues with a counted and logged error, or dies; the surviving store is sound.

    The next process opens the store and reads only data that was put. It finds everything that was
    committed and not evicted, keeps within the budget, and can put and keep new contexts.
    """
    step = scale(43, 1)
    first = FAULTS.index(fault) % step  # each fault tests another share of the points
    found = run_preloaded("driver.py", tmp_path, fault, step, first)
    assert found["problems"] == []
    assert found["points"] >= scale(4, 150)
    assert set(found["ops"]) >= REACHED


@pytest.mark.soak
@pytest.mark.parametrize("fault", scale(SOME, FAULTS))
def test_fault_at_every_operation_of_an_archives_life(run_preloaded, tmp_path, fault):
    """After any fault, added conversations are there and forgotten ones are gone."""
    step = scale(29, 1)
    first = FAULTS.index(fault) % step
    found = run_preloaded("archive_driver.py", tmp_path, fault, step, first)
    assert found["problems"] == []
    assert found["points"] >= scale(4, 150)
    assert set(found["ops"]) >= REACHED_OF_AN_ARCHIVE


@pytest.mark.soak
@pytest.mark.parametrize("fault", scale(SOME, FAULTS))
def test_fault_at_every_operation_of_a_selected_datastores_life(run_preloaded, tmp_path, fault):
    """The file is the old one or the new one, and forgotten conversations are gone."""
    step = scale(17, 1)
    first = FAULTS.index(fault) % step
    found = run_preloaded("datastore_driver.py", tmp_path, fault, step, first)
    assert found["problems"] == []
    assert found["points"] >= scale(4, 90)
    assert set(found["ops"]) >= REACHED_OF_A_DATASTORE
