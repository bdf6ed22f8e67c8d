"""Transfer buffers: inside the RAM budget, sized by the model."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from forking import in_child

from llmaas_hooks import BudgetError
from llmaas_plugins._native import Budget, KVGeometry, blob_size
from llmaas_plugins.kv_chunks.store.chunk_store import ChunkStore
from llmaas_plugins.kv_chunks.transfer.staging import NoRoomNowError, Staging

MiB = 1 << 20
HUGE = KVGeometry(40, False, 1, 1, (8192,) * 40, (8192,) * 40)
SMALL = KVGeometry(1, False, 1, 1, (64,), (64,))


@pytest.mark.parametrize("geometry", [SMALL, HUGE], ids=["small", "huge"])
@pytest.mark.parametrize("limit", [64 * MiB, 512 * MiB])
def test_buffers_hold_a_segment_each_within_the_budget(geometry, limit):
    store = ChunkStore(Budget(limit), None)
    staging = Staging(store.space)
    n = staging.segment_chunks(geometry)
    assert blob_size(geometry, 16 * n) <= staging.buffer(0).nbytes
    assert store.stats()["buffer_bytes"] == staging.all_buffers.nbytes <= limit // 2
    starts = [staging.buffer(i).ctypes.data for i in range(Staging.BUFFERS + 1)]
    assert starts[0] == starts[-1] == staging.all_buffers.ctypes.data
    assert len(set(starts)) == Staging.BUFFERS
    assert set(zip(starts[1:-1], starts[:-2], strict=True)) == {
        (start + staging.buffer(0).nbytes, start) for start in starts[:-2]
    }


def test_buffers_grow_with_the_model_and_give_back_what_they_had():
    store = ChunkStore(Budget(512 * MiB), None)
    staging = Staging(store.space)
    staging.segment_chunks(SMALL)
    small = staging.all_buffers.nbytes
    n = staging.segment_chunks(HUGE)
    assert n == 1
    assert store.stats()["buffer_bytes"] == staging.all_buffers.nbytes > small
    huge = staging.all_buffers.nbytes
    assert staging.segment_chunks(SMALL) > 1
    assert store.stats()["buffer_bytes"] == huge


def test_budget_too_small_for_a_chunk_says_what_would_do():
    store = ChunkStore(Budget(MiB), None)
    with pytest.raises(BudgetError, match="ram_budget to at least") as caught:
        Staging(store.space).segment_chunks(HUGE)
    assert store.stats()["buffer_bytes"] == 0
    enough = int(str(caught.value).rsplit(" ", 1)[1])
    assert Staging(ChunkStore(Budget(enough), None).space).segment_chunks(HUGE) == 1


def test_room_that_parked_contexts_have_comes_back():
    store = ChunkStore(Budget(64 * MiB), None)
    staging = Staging(store.space)
    assert store.space.lend("cells", 50 * MiB) == 50 * MiB
    with pytest.raises(NoRoomNowError, match="parked contexts leave only"):
        staging.segment_chunks(HUGE)
    store.space.lend("cells", 0)
    assert staging.segment_chunks(HUGE) == 1


def test_jobs_of_an_interrupted_load_end_before_the_buffers_are_used_again():
    staging = Staging(ChunkStore(Budget(64 * MiB), None).space)
    starts, ended, started = threading.Event(), [], threading.Event()

    def write():
        started.set()
        starts.wait(30)
        time.sleep(0.01)
        ended.append(True)

    with ThreadPoolExecutor(1) as pool:
        with staging.used():
            for _ in range(2):
                staging.is_written_by(pool.submit(write))
            started.wait(30)
        threading.Timer(0.02, starts.set).start()
        staging.segment_chunks(SMALL)
        assert ended == [True]  # the other job has not begun, and never will
    assert ended == [True]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12 warns about threads
def test_a_forked_child_waits_for_no_job():
    staging = Staging(ChunkStore(Budget(64 * MiB), None).space)
    starts = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        staging.is_written_by(pool.submit(starts.wait, 30))
        assert in_child(lambda: staging.segment_chunks(SMALL)) == 0
        starts.set()
