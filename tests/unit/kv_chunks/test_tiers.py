"""RAM arena, slab file and transfer buffers: bounded, and emptied in order of use."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from llmaas_hooks import BudgetError, StoreError
from llmaas_plugins._native import Budget
from llmaas_plugins.kv_chunks.store import disk_tier
from llmaas_plugins.kv_chunks.store.chunk_ids import chain
from llmaas_plugins.kv_chunks.store.disk_tier import DiskTier
from llmaas_plugins.kv_chunks.store.extents import PAGE, page_round
from llmaas_plugins.kv_chunks.store.ram_tier import RamTier
from llmaas_plugins.kv_chunks.store.tier import Tier
from llmaas_plugins.kv_chunks.store.tree import Chunk

MiB = 1 << 20


def make_chunks(n, size=PAGE):
    return [Chunk(wanted, size) for wanted in chain(bytes(32), np.arange(16 * n, dtype=np.int32))]


def enter(tier, chunks):
    for chunk in chunks:
        chunk.ram = tier.reserve(chunk.size, never, never)
        tier.queue.add(chunk)


def never(chunk):
    pytest.fail(f"{chunk} was considered for eviction")


class Evictions(list):
    """Eviction callback that evicts from ``tier`` and records the chunks."""

    def __init__(self, tier):
        super().__init__()
        self.tier = tier

    def __call__(self, chunk):
        self.append(chunk)
        self.tier.free(chunk, chunk.ram)


def test_least_recently_used_go_first():
    tier, chunks = Tier(4 * PAGE, "lru"), make_chunks(4)
    enter(tier, chunks)
    tier.queue.touch(chunks[0])
    tier.queue.touch(chunks[2])
    evict = Evictions(tier)
    assert tier.reserve(PAGE, lambda chunk: True, evict) == PAGE
    assert evict == [chunks[1]]
    assert tier.reserve(PAGE, lambda chunk: True, evict) == 3 * PAGE
    assert evict == [chunks[1], chunks[3]]
    assert len(tier.queue) == 2


def test_chunks_that_may_not_go_are_passed_over():
    tier, chunks = Tier(3 * PAGE, "lru"), make_chunks(3)
    enter(tier, chunks)
    evict = Evictions(tier)
    assert tier.reserve(PAGE, lambda chunk: chunk is chunks[2], evict) == 2 * PAGE
    assert evict == [chunks[2]]
    assert tier.reserve(PAGE, lambda chunk: False, evict) is None
    assert tier.used_bytes == 3 * PAGE


def test_room_is_made_by_as_few_as_give_a_run():
    tier, chunks = Tier(4 * PAGE, "lru"), make_chunks(4)
    enter(tier, chunks)
    evict = Evictions(tier)
    assert tier.reserve(2 * PAGE, lambda chunk: True, evict) == 0
    assert evict == chunks[:2]


def test_what_can_never_fit_evicts_nothing():
    tier = Tier(4 * PAGE, "lru")
    enter(tier, make_chunks(4))
    assert tier.reserve(4 * PAGE + 1, never, never) is None
    assert len(tier.queue) == 4


def test_touching_a_chunk_that_is_not_there_does_nothing():
    tier, chunks = Tier(4 * PAGE, "lru"), make_chunks(2)
    enter(tier, chunks[:1])
    tier.queue.touch(chunks[1])
    assert len(tier.queue) == 1


def test_reservations_that_no_chunk_took_come_back():
    tier = Tier(4 * PAGE, "lru")
    offset = tier.reserve(3 * PAGE, never, never)
    tier.shrink(offset, 3 * PAGE, PAGE)
    assert tier.used_bytes == PAGE
    tier.cancel(offset, PAGE)
    assert tier.used_bytes == 0


def test_ram_tier_accounts_for_what_the_budget_has_left():
    budget = Budget(MiB + 100)
    budget.reserve(PAGE)
    tier = RamTier(budget, "lru")
    assert budget.used == budget.limit
    assert tier.capacity == MiB - PAGE  # whole pages
    with pytest.raises(BudgetError):
        budget.reserve(1)


def test_ram_tier_beyond_the_address_space():
    with pytest.raises(BudgetError, match=r"cannot reserve \d+ MiB .* Lower .*ram_budget"):
        RamTier(Budget(1 << 60), "lru")


def test_ram_tier_views_are_the_memory_at_their_address():
    tier = RamTier(Budget(MiB), "lru")
    view = tier.view(2 * PAGE, 100)
    assert len(view) == 100
    assert view.ctypes.data == tier.address(2 * PAGE)
    assert tier.address(0) % PAGE == 0
    assert not tier.view(0, tier.capacity).any()
    tier.view(tier.capacity - 1, 1)[:] = 7
    assert tier.view(0, tier.capacity).sum() == 7


@pytest.fixture
def disk(tmp_path):
    tier = DiskTier(tmp_path / "chunks.slab", 16 * PAGE)
    yield tier
    tier.close()


def test_slab_starts_empty_and_private(disk, tmp_path):
    assert disk.file_size() == 0
    assert disk.read_header() == b""
    assert stat.S_IMODE((tmp_path / "chunks.slab").stat().st_mode) == 0o600


def test_header_takes_the_first_page(disk, tmp_path):
    disk.write_header(b"one")
    assert disk.file_size() == DiskTier.HEADER_BYTES == disk.file_offset(0)
    assert disk.read_header() == b"one".ljust(DiskTier.HEADER_BYTES, b"\0")
    os.truncate(tmp_path / "chunks.slab", 10 * PAGE)
    disk.write_header(b"two")
    assert disk.file_size() == DiskTier.HEADER_BYTES
    assert disk.read_header().rstrip(b"\0") == b"two"


def test_slab_stays_within_its_budget(disk):
    end = disk.file_offset(disk.capacity)
    assert disk.capacity % PAGE == 0
    assert end <= 16 * PAGE


def test_slab_is_found_again(disk, tmp_path):
    disk.write_header(b"mine")
    again = DiskTier(tmp_path / "chunks.slab", 16 * PAGE)
    assert again.read_header().rstrip(b"\0") == b"mine"
    again.close()


def test_closed_slab_has_no_descriptors_left(tmp_path):
    open_files = Path("/proc/self/fd")
    before = len(list(open_files.iterdir()))
    tier = DiskTier(tmp_path / "chunks.slab", PAGE)
    assert len(list(open_files.iterdir())) == before + 2
    tier.close()
    assert len(list(open_files.iterdir())) == before


def fill(disk, tmp_path, n):
    """Write a header and ``n`` chunks whose pages are full of 0x5a."""
    disk.write_header(b"mine")
    chunks = make_chunks(n)
    for chunk in chunks:
        chunk.disk = disk.reserve(PAGE, never, never)
        disk.queue.add(chunk)
    with (tmp_path / "chunks.slab").open("ab") as file:
        file.write(b"\x5a" * n * PAGE)
    disk.take_stale()
    return chunks


def test_only_what_was_freed_is_erased(disk, tmp_path):
    chunks = fill(disk, tmp_path, 6)
    disk.free(chunks[1], chunks[1].disk)
    disk.free(chunks[2], chunks[2].disk)
    disk.free(chunks[4], chunks[4].disk)
    disk.release(disk.take_held())
    assert disk.reserve(PAGE, never, never) == PAGE  # chunk 1's place, for new bytes
    # chunk 2's place, which never got the new bytes
    disk.cancel(disk.reserve(PAGE, never, never), PAGE)
    places = disk.take_stale()
    assert places == [(2 * PAGE, PAGE), (4 * PAGE, PAGE)]
    disk.erase(places)
    content = (tmp_path / "chunks.slab").read_bytes()[PAGE:]
    full = [i for i in range(6) if content[i * PAGE : (i + 1) * PAGE] == b"\x5a" * PAGE]
    assert full == [0, 1, 3, 5]
    assert content.count(b"\x5a") == 4 * PAGE
    assert disk.take_stale() == []


def test_all_free_space_of_a_slab_that_was_found_may_hold_old_bytes(disk, tmp_path):
    fill(disk, tmp_path, 4)
    again = DiskTier(tmp_path / "chunks.slab", 16 * PAGE)
    assert again.claim(PAGE, PAGE)
    # and nothing behind the file's end
    assert again.take_stale() == [(0, PAGE), (2 * PAGE, 2 * PAGE)]
    again.close()


def test_places_that_could_not_be_erased_stay_marked(disk, tmp_path):
    chunks = fill(disk, tmp_path, 2)
    disk.free(chunks[0], 0)
    places = disk.take_stale()
    file, disk._file = disk._file, os.open("/dev/full", os.O_RDWR)
    with pytest.raises(StoreError, match="erasing stopped"):
        disk.erase(places)
    os.close(disk._file)
    disk._file = file
    assert disk.take_stale() == places == [(0, PAGE)]


def test_more_marks_than_are_worth_keeping_mean_everything(disk, tmp_path, monkeypatch):
    monkeypatch.setattr(disk_tier, "_MAX_STALE_RANGES", 2)
    chunks = fill(disk, tmp_path, 6)
    for chunk in chunks[:4]:
        disk.free(chunk, chunk.disk)
    assert disk.take_stale() == [(0, 4 * PAGE)]


def test_place_that_the_index_still_names_is_taken_last(disk, tmp_path):
    chunks = fill(disk, tmp_path, 15)  # the whole tier
    disk.free(chunks[3], chunks[3].disk)
    assert disk.used_bytes == 14 * PAGE
    held = disk.take_held()
    assert disk.reserve(PAGE, lambda _: False, never) is None  # a commit is under way
    assert disk.used_bytes == 14 * PAGE
    disk.release(held)
    assert disk.reserve(PAGE, never, never) == 3 * PAGE
    assert not disk.reuses_held
    disk.free(chunks[5], chunks[5].disk)
    assert disk.reserve(PAGE, never, never) == 5 * PAGE
    assert disk.reuses_held


def test_places_stay_held_after_a_failed_commit(disk, tmp_path):
    chunks = fill(disk, tmp_path, 2)
    disk.free(chunks[0], 0)
    disk.hold_again(disk.take_held(), reuses_held=False)
    assert disk.reserve(PAGE, never, never) == 2 * PAGE
    assert not disk.reuses_held
    disk.release_early()
    disk.hold_again(disk.take_held(), reuses_held=True)
    assert disk.reuses_held


def test_no_more_places_are_held_than_a_save_replaces(tmp_path):
    with contextlib.closing(DiskTier(tmp_path / "chunks.slab", 101 * PAGE)) as disk:
        chunks = fill(disk, tmp_path, 40)
        for chunk in chunks[:16]:
            disk.free(chunk, chunk.disk)
        assert disk.reserve(PAGE, never, never) == 40 * PAGE
        disk.free(chunks[16], chunks[16].disk)
        assert disk.reserve(PAGE, never, never) == 0
        assert disk.reuses_held


def test_slab_is_cut_behind_the_last_chunk(disk, tmp_path):
    chunks = fill(disk, tmp_path, 4)
    disk.free(chunks[1], chunks[1].disk)
    disk.truncate_tail()
    assert disk.file_size() == 5 * PAGE
    disk.free(chunks[3], chunks[3].disk)
    disk.release(disk.take_held())
    disk.truncate_tail()
    assert disk.file_size() == 4 * PAGE
    for i in (0, 2):
        disk.free(chunks[i], chunks[i].disk)
    disk.release(disk.take_held())
    disk.truncate_tail()
    assert disk.file_size() == PAGE


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.slow
def test_chunks_that_move_keep_their_bytes(seed):
    """Random cuts, frees, uses and claims never mix up chunks' bytes or lose room."""
    rng = np.random.default_rng(seed)
    tier, chunks = RamTier(Budget(64 * PAGE), "lru"), make_chunks(400)
    there, n_moved = [], 0

    def evict(chunk):
        tier.free(chunk, chunk.ram)
        there.remove(chunk)

    for i, chunk in enumerate(chunks):
        chunk.size = int(rng.integers(1, 6)) * PAGE - 7
        before = [other.ram for other in there]
        tier.compact()
        n_moved += sum(a != b.ram for a, b in zip(before, there, strict=True))
        assert all(a == b.ram for a, b in zip(before, there, strict=True) if b.pins)
        place = tier.reserve(chunk.size, lambda other: other.pins == 0, evict)
        tier.view(place, chunk.size)[:] = i % 251
        chunk.ram, chunk.n_scores = place, i % 251
        tier.queue.add(chunk)
        there.append(chunk)
        for other in rng.choice(np.array(there, dtype=object), 2):
            other.pins = int(rng.integers(0, 4) == 0)
            if other.pins == 0 and other.size > PAGE:
                tier.queue.remove(other)
                tier.shrink(other.ram, other.size, other.size - PAGE)
                other.size -= PAGE
                tier.queue.add(other)
        for other in there:
            assert (tier.view(other.ram, other.size) == other.n_scores).all()
        taken = sum(page_round(other.size) for other in there)
        assert tier.used_bytes == taken
    assert n_moved > 20
