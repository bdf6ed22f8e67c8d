"""Segments on their way to the engine bring the cells that were stored, each in its place."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from llmaas_plugins._native import (
    RECORD_MAX,
    Budget,
    Codec,
    KVGeometry,
    blob_init,
    blob_size,
    chunk_bound,
    chunk_encode,
    chunks_decode,
)
from llmaas_plugins.kv_chunks.disk import DiskStore
from llmaas_plugins.kv_chunks.keys import chain
from llmaas_plugins.kv_chunks.pipeline import Loader
from llmaas_plugins.kv_chunks.staging import Staging
from llmaas_plugins.kv_chunks.store import ChunkStore

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
    """Directory of a store that holds all of them."""
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
    """Load the context with so much RAM, after ``spoil``; tokens of each segment."""
    pool = ThreadPoolExecutor(4)
    stores = []

    def loaded(ram, spoil=None, start=0, stop_after=None):
        stores.append(store := ChunkStore(Budget(ram), DiskStore(slab, 64 * MiB)))
        path, n_tokens = store.match(ROOT, TOKENS)
        assert n_tokens == len(TOKENS)
        if spoil is not None:
            store.fault(path[spoil])
        loader = Loader(store, Staging(store), pool, GEOM)
        first, n_found, lengths = start // 16, 0, []
        with loader._staging.lock:
            segments = loader.segments(path[first:], start)
            for segment in segments:
                check(segment, path[first + n_found :], start + 16 * n_found)
                n_found += -(-segment.n_tokens // 16)
                lengths.append(segment.n_tokens)
                if len(lengths) == stop_after:
                    segments.close()
        assert all(chunk.pins == 0 for chunk in path)
        return lengths

    def check(segment, chunks, start):
        if segment.n_tokens == 0:
            return
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
    pool.shutdown()
    for store in stores:
        store._swap._disk.close()  # not the store: the next test finds the index as it was


def test_records_are_shorter_than_segments():
    assert RECORD_MAX < 4 * BOUND


@pytest.mark.parametrize(
    ("ram", "lengths"),
    [
        (64 * MiB, [7 * 16] * 5 + [75]),
        (40 * MiB, [4 * 16] * 9 + [59]),
        (16 * MiB, [16] * 39 + [11]),
    ],
)
def test_every_cell_arrives(load, ram, lengths):
    assert load(ram) == lengths


def test_context_that_fits_the_buffers_comes_at_once(load):
    assert load(64 * MiB, start=16 * 20) == [len(TOKENS) - 16 * 20]


def test_cells_behind_others_have_later_positions(load):
    assert sum(load(64 * MiB, start=48)) == len(TOKENS) - 48


@pytest.mark.parametrize("ram", [64 * MiB, 40 * MiB, 16 * MiB])
@pytest.mark.parametrize("spoil", [0, 1, 6, 7, 17, 39])
def test_loading_ends_before_what_is_missing(load, ram, spoil):
    assert sum(load(ram, spoil)) == 16 * spoil


@pytest.mark.parametrize("n", [1, 3, 5])
def test_loading_may_be_given_up(load, n):
    assert len(load(40 * MiB, stop_after=n)) == n
