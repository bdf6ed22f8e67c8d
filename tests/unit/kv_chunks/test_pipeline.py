"""Segments on their way to the engine: they bring the stored cells, each to its place."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from llmaas_plugins._native import (
    Budget,
    Codec,
    KVGeometry,
    blob_init,
    blob_size,
    chunk_bound,
    chunk_encode,
    chunks_decode,
)
from llmaas_plugins.kv_chunks.store.chunk_ids import chain
from llmaas_plugins.kv_chunks.store.chunk_store import ChunkStore
from llmaas_plugins.kv_chunks.store.disk_store import DiskStore
from llmaas_plugins.kv_chunks.store.tree import ABSENT
from llmaas_plugins.kv_chunks.transfer.chunk_load import CellSegment, ReadTimer, split_jobs
from llmaas_plugins.kv_chunks.transfer.pipeline import _READ_BYTES, SegmentLoader, Workers
from llmaas_plugins.kv_chunks.transfer.planning import ChunkRun
from llmaas_plugins.kv_chunks.transfer.staging import Staging

ROOT = b"r" * 32
GEOM = KVGeometry(4, False, 1, 1, (4096,) * 4, (4096,) * 4)  # a chunk is half a MiB
BOUND = chunk_bound(GEOM, Codec.RAW, 16)
N_CHUNKS = 40
TOKENS = np.arange(16 * N_CHUNKS - 5, dtype=np.int32)
MiB = 1 << 20


@pytest.fixture(scope="module")
def payloads():
    rng, found = np.random.default_rng(6), {}
    for wanted in chain(ROOT, TOKENS):
        blob, out = rng.integers(0, 256, blob_size(GEOM, 16), np.uint8), bytearray(BOUND)
        blob_init(GEOM, blob, range(16))
        n_tokens = len(wanted.tokens) // 4
        found[wanted.key] = out[
            : chunk_encode(GEOM, Codec.RAW, blob, 16, 0, n_tokens, wanted.key, out)
        ]
    return found


@pytest.fixture(scope="module")
def slab(payloads, tmp_path_factory):
    """Return the directory of a store that holds all payloads."""
    directory = tmp_path_factory.mktemp("store") / "kv"
    store = ChunkStore(Budget(64 * MiB), DiskStore(directory, 64 * MiB))
    for i, wanted in enumerate(chain(ROOT, TOKENS)):

        def encode(out, data=payloads[wanted.key]):
            out[: len(data)] = np.frombuffer(data, np.uint8)
            return len(data)

        assert store.put(wanted, BOUND, encode, is_first=i == 0)
    store.close()
    return directory


@pytest.fixture
def load(slab, payloads):
    """Load the context with some RAM after ``spoil``; return lengths of segments and gaps."""
    workers = Workers()
    stores = []

    def loaded(ram, *, spoil=(), start=0, stop_after=None, gaps=(), in_ram=()):
        stores.append(store := ChunkStore(Budget(ram), DiskStore(slab, 64 * MiB)))
        path, n_tokens = store.match(ROOT, TOKENS)
        assert n_tokens == len(TOKENS)
        store.reader.unpin([path[i] for i in in_ram if store.reader.fetch([path[i]])])
        for i in spoil:
            store.reader.drop_damaged(path[i])
        chunks, lengths, position = path[start // 16 :], [], start
        loader = SegmentLoader(store, Staging(store.space), workers, GEOM)
        with loader._staging.used():
            steps = loader.steps(runs(chunks, gaps), start, ReadTimer())
            for step in steps:
                if isinstance(step, CellSegment):
                    check(step, path[position // 16 :], position)
                position += step.n_tokens
                lengths.append((type(step).__name__, step.n_tokens))
                if len(lengths) == stop_after:
                    steps.close()
        assert all(chunk.pins == 0 for chunk in path)
        return lengths

    def runs(chunks, gaps):
        marked = [(i not in gaps, chunk) for i, chunk in enumerate(chunks)]
        groups = itertools.groupby(marked, key=lambda pair: pair[0])
        return [ChunkRun([chunk for _, chunk in group], is_loaded) for is_loaded, group in groups]

    def check(segment, chunks, start):
        wanted, n_tokens = [], 0
        while n_tokens < segment.n_tokens:
            wanted.append(chunks[len(wanted)])
            n_tokens += wanted[-1].n_tokens
        assert n_tokens == segment.n_tokens
        expected = np.zeros(blob_size(GEOM, n_tokens), np.uint8)
        data = [payloads[chunk.id.key] for chunk in wanted]
        chunks_decode(GEOM, data, range(0, n_tokens, 16), expected, n_tokens)
        blob_init(GEOM, expected, range(start, start + n_tokens))
        assert np.array_equal(segment.blob, expected)

    yield loaded
    workers.close()
    for store in stores:
        # close only the file, so that the next test finds the index unchanged
        store._writer._disk.close()


def segments(*lengths):
    return [("CellSegment", n) for n in lengths]


def merged(steps):
    """Merge neighbors of one kind."""
    groups = itertools.groupby(steps, key=lambda step: step[0])
    return [(kind, sum(n for _, n in group)) for kind, group in groups]


RAM = {"large": 64 * MiB, "middling": 40 * MiB, "small": 16 * MiB}


def test_reads_are_shorter_than_segments():
    assert _READ_BYTES < 4 * BOUND


@pytest.mark.parametrize(
    ("ram", "lengths"),
    [
        (64 * MiB, [7 * 16] * 5 + [75]),
        (40 * MiB, [4 * 16] * 9 + [59]),
        (16 * MiB, [16] * 39 + [11]),
    ],
    ids=RAM,
)
def test_every_cell_arrives(load, ram, lengths):
    assert load(ram) == segments(*lengths)


def test_context_that_fits_the_buffers_comes_at_once(load):
    assert load(64 * MiB, start=16 * 20) == segments(len(TOKENS) - 16 * 20)


def test_cells_behind_others_have_later_positions(load):
    assert merged(load(64 * MiB, start=48)) == segments(len(TOKENS) - 48)


@pytest.mark.parametrize("ram", RAM.values(), ids=RAM)
@pytest.mark.parametrize(
    "spoil", [[0], [1], [6, 7, 8], [17, 19], [*range(2, 30)], [*range(0, 39, 2)]], ids=str
)
def test_what_is_missing_leaves_gaps(load, ram, spoil):
    expected = merged(
        ("Gap" if i in spoil else "CellSegment", min(16, len(TOKENS) - 16 * i))
        for i in range(N_CHUNKS)
    )
    assert merged(load(ram, spoil=spoil)) == expected


@pytest.mark.parametrize("ram", RAM.values(), ids=RAM)
def test_what_is_missing_at_the_end_is_left_out(load, ram):
    assert merged(load(ram, spoil=[39])) == segments(16 * 39)


@pytest.mark.parametrize("ram", RAM.values(), ids=RAM)
@pytest.mark.parametrize("in_ram", [(), (0, 1, 20, 39)], ids=["on disk", "some in RAM"])
@pytest.mark.parametrize(
    "gaps", [range(5), range(37), [4, 5, 30], [0, 2, 4, 6, 38]], ids=lambda gaps: str([*gaps])
)
def test_planned_gaps_come_in_their_place(load, ram, in_ram, gaps):
    expected = merged(
        ("Gap" if i in gaps else "CellSegment", min(16, len(TOKENS) - 16 * i))
        for i in range(N_CHUNKS)
    )
    found = load(ram, gaps=gaps, in_ram=in_ram)
    assert merged(found) == expected
    planned = [n for kind, n in found if kind == "Gap"]
    assert planned == [n for kind, n in expected if kind == "Gap"]  # each in one piece


@pytest.mark.parametrize(("gaps", "is_ahead"), [((), False), (range(5), True)], ids=str)
def test_what_comes_behind_a_gap_is_read_ahead(load, reads_ahead, gaps, is_ahead):
    load(40 * MiB, gaps=gaps)
    assert set(reads_ahead) == {is_ahead}


def test_planned_and_found_gaps_may_meet(load):
    found = load(40 * MiB, spoil=[5, 6, 20], gaps=[0, 1, 2, 3, 4, 21])
    assert merged(found) == merged(
        ("Gap" if i in {*range(7), 20, 21} else "CellSegment", min(16, len(TOKENS) - 16 * i))
        for i in range(N_CHUNKS)
    )


@pytest.mark.parametrize("gaps", [(), range(2)], ids=["loaded", "recomputed"])
@pytest.mark.parametrize("n", [1, 3, 5])
def test_loading_may_be_given_up(load, gaps, n):
    assert len(load(40 * MiB, stop_after=n, gaps=gaps)) == n


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "after the next job"])
def test_a_job_runs_once_if_no_thread_starts_for_a_moment(monkeypatch, is_late):
    real, fails, ran = threading.Thread.start, [True], []

    def start(thread):
        if fails:
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    workers = Workers()
    assert workers.load.submit(ran.append, 1).done()
    if is_late:
        fails.clear()
        workers.load.submit(ran.append, 2).result(30)
    monkeypatch.undo()
    workers.close()
    assert ran == [1, 2][: 1 + is_late]


def test_an_error_of_a_job_is_its_result():
    workers = Workers()
    job = workers.load.submit(int, "x")
    with pytest.raises(ValueError, match="invalid literal"):
        job.result(30)
    workers.close()


@pytest.mark.parametrize(
    ("sizes", "lengths"),
    [
        ([300_000] * 7, [3, 4]),
        ([300_000], [1]),
        ([3 * MiB // 2] * 2, [1, 1]),
        ([100] * 5, [5]),
        ([0, 0], [2]),
    ],
)
def test_jobs_that_read_have_about_the_same_size(sizes, lengths):
    chunks = [SimpleNamespace(size=size, ram=ABSENT) for size in sizes]
    jobs = list(split_jobs(chunks, MiB))
    assert [len(job) for job in jobs] == lengths
    assert [chunk for job in jobs for chunk in job] == chunks


def test_chunks_in_ram_are_in_jobs_of_their_own():
    chunks = [SimpleNamespace(size=100, ram=ram) for ram in (0, 4096, ABSENT, ABSENT, 8192)]
    assert [len(job) for job in split_jobs(chunks, MiB)] == [2, 2, 1]
