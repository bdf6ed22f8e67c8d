"""Torn, damaged, foreign and hostile archives: a torn tail is dropped, all else is refused."""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from archived import BINDING, assert_holds, fill, record, record_id
from damages import FOREIGN, LINKS, ODD, cuts, each, each_told, files, flip, flips, overwrite

from llmaas_hooks import StoreError
from llmaas_plugins._native import crc32c
from llmaas_plugins.knn_lm.archive import archive as archive_module
from llmaas_plugins.knn_lm.archive.archive import Archive
from llmaas_plugins.knn_lm.archive.record import (
    COLUMNS,
    HEADER_BYTES,
    PAGE,
    RecordHeader,
)
from llmaas_plugins.knn_lm.archive.segments import Binding

RECORDS = [record(i, n_tokens=n) for i, n in enumerate([9, 120, 30])]
FIRST = "000000.0.segment"
PARTS = ("header", "header's checksum", "meta", "tokens", "columns", "keys")


@pytest.fixture
def store(tmp_path):
    fill(tmp_path / "store", RECORDS)
    return tmp_path / "store"


@pytest.fixture
def two_segments(tmp_path, monkeypatch):
    monkeypatch.setattr(archive_module, "_MOST_SEGMENT_BYTES", 7 * PAGE)
    store = tmp_path / "store"
    fill(store, RECORDS)
    assert len(list(store.glob("*.segment"))) == 2
    return store


def places(store, name=FIRST):
    """Return where each record of a segment begins, and its header."""
    data = (store / name).read_bytes()
    at = PAGE
    while at < len(data):
        header = RecordHeader.unpack(data[at : at + HEADER_BYTES], BINDING.n_embd)
        yield at, header
        at += header.n_bytes


def parts(header):
    """Return a byte in the middle of each part of a record."""
    meta, columns = HEADER_BYTES + header.n_meta // 2, header.columns_at + COLUMNS.itemsize // 2
    places = 40, 66, meta, header.tokens_at + 5, columns, header.keys_at + 7
    return dict(zip(PARTS, places, strict=True))


def use_everything(store, binding=BINDING):
    with Archive.open(store, binding) as archive:
        archive.conversations()
        archive.token_sequences()
        archive.columns()
        archive.pairs(np.arange(archive.n_pairs))


def assert_refused(store, match):
    """Reading stops at the damage, and opening to write changes nothing."""
    before = files(store)
    with pytest.raises(StoreError, match=match):
        use_everything(store)
    with contextlib.suppress(StoreError), Archive.open(store, BINDING, writable=True):
        pass
    assert files(store) == before


def assert_torn(store, left, caplog):
    """Reading keeps the tail; opening to write drops it, logs this, and continues."""
    size = (store / FIRST).stat().st_size
    with Archive.open(store, BINDING) as archive:
        assert_holds(archive, left)
    assert (store / FIRST).stat().st_size == size
    caplog.clear()
    with Archive.open(store, BINDING, writable=True) as archive:
        assert_holds(archive, left)
        for one in RECORDS[len(left) :]:
            archive.append(one)
        assert_holds(archive, RECORDS)
    assert [r.getMessage().count("is incomplete and is dropped") for r in caplog.records] == [1]


# -- torn tails ---------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("name", [*PARTS, "padding"])
def test_file_that_ends_within_a_record_keeps_those_before(store, number, name, caplog):
    at, header = list(places(store))[number]
    os.truncate(store / FIRST, at + (parts(header) | {"padding": header.n_bytes - 1})[name])
    assert_torn(store, RECORDS[:number], caplog)


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_file_that_ends_between_records_is_just_shorter(store, number):
    ends = [PAGE, *(at + header.n_bytes for at, header in places(store))]
    os.truncate(store / FIRST, ends[number])
    with Archive.open(store, BINDING, writable=True) as archive:
        assert_holds(archive, RECORDS[:number])


@pytest.mark.parametrize("name", PARTS)
def test_last_record_that_is_not_what_was_written_is_a_torn_tail(store, name, caplog):
    at, header = list(places(store))[-1]
    flip(store / FIRST, at + parts(header)[name])
    assert_torn(store, RECORDS[:2], caplog)


@pytest.mark.parametrize("tail", [b"x", b"\0" * 100, b"\0" * 9 * PAGE, b"LLMAASRC" * 5000])
def test_anything_behind_the_last_record_is_a_torn_tail(store, tail, caplog):
    with (store / FIRST).open("ab") as file:
        file.write(tail)
    assert_torn(store, RECORDS, caplog)


def test_append_that_fails_leaves_what_was_there(store, monkeypatch):
    fsync, calls = os.fsync, []

    def full(fd):
        calls.append(fd)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        fsync(fd)

    with Archive.open(store, BINDING, writable=True) as archive:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(StoreError, match=r"cannot write to datastore .*: No space left"):
            archive.append(record(50, n_tokens=500))
        assert_holds(archive, RECORDS)
        archive.append(record(51))  # shorter than the torn tail
        assert_holds(archive, [*RECORDS, record(51)])
    with Archive.open(store, BINDING) as archive:
        assert_holds(archive, [*RECORDS, record(51)])


# -- damage -------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("name", PARTS)
def test_damage_before_the_end_is_refused_and_placed(store, number, name):
    at, header = list(places(store))[number]
    flip(store / FIRST, at + parts(header)[name])
    assert_refused(store, rf"000000\.0\.segment, the record at byte {at}: found .*, expected .*")


@pytest.mark.parametrize("name", ["header", "meta", "keys", "cut"])
def test_damage_in_a_segment_before_the_last_is_no_torn_tail(two_segments, name):
    at, header = list(places(two_segments))[-1]
    if name == "cut":
        os.truncate(two_segments / FIRST, at + header.n_bytes - PAGE)
    else:
        flip(two_segments / FIRST, at + parts(header)[name])
    assert_refused(two_segments, f"the record at byte {at}: found .*, expected .*")


def test_damaged_key_is_found_when_it_is_read_and_named(store):
    at, header = next(places(store))
    flip(store / FIRST, at + header.keys_at + 3 * header.key_bytes)
    with Archive.open(store, BINDING) as archive:
        assert len(archive.pairs(np.array([0, 1, 2, 4])).keys) == 4
        with pytest.raises(
            StoreError, match=r"of the key of pair 3, expected .* Nothing was chang"
        ):
            archive.pairs(np.array([5, 3]))


def test_damaged_segment_header_is_refused(store):
    for _ in flips(store / FIRST, [0, 3, 9, 13, 17, 21, 30, 60]):
        assert_refused(store, r"000000\.0\.segment, its header: found .*, expected .*")


def test_segment_without_a_whole_header_is_refused(store):
    for size in cuts(store / FIRST, [0, 1, 40, 64, PAGE - 1]):
        assert_refused(store, f"its header: found {size} bytes, expected at least 4096")


@each(FOREIGN)
def test_segment_of_another_kind_is_refused(store, damage):
    damage(store / FIRST)
    assert_refused(store, r"000000\.0\.segment, its header: found .*, expected .*")


def test_damaged_conversation_can_be_forgotten(store):
    at, header = next(places(store))
    flip(store / FIRST, at + header.keys_at)
    with Archive.open(store, writable=True) as archive:
        archive.forget([record_id(RECORDS[0])])
    with Archive.open(store) as archive:
        assert_holds(archive, RECORDS[1:])


# -- lies with right checksums ------------------------------------------------------------------


def rewrite_header(store, **changes):
    at, header = next(places(store))
    overwrite(store / FIRST, at, replace(header, **changes).pack())


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"n_bytes": 1 << 62}, "found a length of 4611686018427387904, expected 8192 by its parts"),
        ({"n_bytes": 0}, "found a length of 0, expected"),
        ({"n_bytes": (1 << 64) - PAGE}, "found a length of .*, expected"),
        ({"n_pairs": (1 << 32) - 1}, "found a length of 8192, expected"),
        ({"n_meta": (1 << 32) - 1}, "found a length of 8192, expected"),
        ({"n_embd": 1 << 31}, "found keys of 2147483648 numbers, expected 24"),
        ({"n_embd": 48}, "found keys of 48 numbers, expected 24"),
        ({"n_tokens": 8}, "found checksum .* of its tokens, expected"),
        ({"n_pairs": 7}, "found checksum .* of its columns, expected"),
    ],
    ids=str,
)
def test_sizes_that_cannot_be_are_refused_before_anything_is_allocated(store, changes, found):
    rewrite_header(store, **changes)
    tracemalloc.start()
    assert_refused(store, found)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 << 20


def test_consistent_sizes_beyond_the_file_are_refused(store):
    _, header = next(places(store))
    huge = replace(header, n_pairs=1 << 31)
    rewrite_header(store, n_pairs=huge.n_pairs, n_bytes=huge.end)
    assert_refused(store, f"found a length of {huge.end}, expected at most")


def rewrite_meta(store, data):
    at, header = next(places(store))
    assert len(data) <= header.tokens_at - HEADER_BYTES or header.n_meta >= len(data)
    overwrite(store / FIRST, at + HEADER_BYTES, data)
    rewrite_header(store, n_meta=len(data), meta_sum=crc32c(data))


@pytest.mark.parametrize(
    "meta",
    [
        b"",
        b"not json",
        b"\xff\xfe\x00",
        b"[]",
        b"7",
        b'{"title": "t"}',
        b'{"title":1,"app":"a","source":"s","added":0,"messages":[]}',
        b'{"title":"t","app":"a","source":"s","added":"now","messages":[]}',
        b'{"title":"t","app":"a","source":"s","added":NaN,"messages":[]}',
        b'{"title":"t","app":"a","source":"s","added":1e300,"messages":[]}',
        b'{"title":"t","app":"a","source":"s","added":0,"messages":{}}',
        b'{"title":"t","app":"a","source":"s","added":0,"messages":[7]}',
        b'{"title":"t","app":"a","source":"s","added":0,"messages":[{"role":"x"}]}',
        b'{"title":"t","app":"a","source":"s","added":0,"messages":[{"role":"user"}]}',
    ],
)
def test_meta_of_another_form_is_refused(store, meta):
    rewrite_meta(store, meta)
    assert_refused(store, "found meta of another form .*, expected JSON with title")


def test_meta_nested_without_end_is_refused(tmp_path):
    one = record(1)
    deep = "[" * 100_000
    long = replace(one.conversation.messages[0], content="x" * len(deep))
    store = tmp_path / "store"
    fill(store, [replace(one, conversation=replace(one.conversation, messages=(long,))), record(2)])
    rewrite_meta(store, deep.encode())
    assert_refused(store, r"found meta of another form \(ValueError\)")


@pytest.mark.parametrize("position", [-1, 9, 2**31 - 1, -(2**31)])
def test_targets_outside_the_tokens_are_refused(store, position):
    at, header = next(places(store))
    data = (store / FIRST).read_bytes()
    start = at + header.columns_at
    columns = np.frombuffer(data, COLUMNS, header.n_pairs, start).copy()
    columns["position"][2] = position
    overwrite(store / FIRST, start, columns.tobytes())
    rewrite_header(store, columns_sum=crc32c(columns.tobytes()))
    assert_refused(store, "found positions .*, expected 0 to 8")


@pytest.mark.parametrize("changes", [{"number": 1}, {"id": record_id(RECORDS[1])}])
def test_two_conversations_of_one_name_are_refused(store, changes):
    rewrite_header(store, **changes)
    assert_refused(store, "3 records with .* different ids and .* numbers")


def test_segment_of_another_model_among_ours_is_refused(store, tmp_path):
    fill(tmp_path / "other", [record(9)], Binding(b"g" * 32, BINDING.n_embd, "ffn_input"))
    (store / "000007.0.segment").write_bytes((tmp_path / "other" / FIRST).read_bytes())
    assert_refused(store, r"000007\.0\.segment is for model 676767676767, .* expected model 6666")
    with pytest.raises(StoreError, match="000007"):
        Archive.open(store)


@pytest.mark.parametrize(
    ("at", "value", "found"),
    [
        (8, 9, "has format 9, expected 1. Use the release"),
        (12, 0, "its header: found keys of 0 numbers, expected 1 to"),
        (12, (1 << 32) - 1, "its header: found keys of 4294967295 numbers"),
        (16, 2, "its header"),
    ],
)
def test_segment_header_with_a_right_checksum_may_lie(store, at, value, found):
    page = bytearray((store / FIRST).read_bytes()[:PAGE])
    page[at : at + 4] = struct.pack("<I", value)
    page[56:64] = hashlib.blake2b(page[:56], digest_size=8).digest()
    overwrite(store / FIRST, 0, bytes(page))
    assert_refused(store, found)


# -- other things than files --------------------------------------------------------------------


@pytest.mark.parametrize("name", [FIRST, "000001.0.segment", "000001.0.segment.partial"])
@each_told({r"is a symbolic link\. Remove it": LINKS, "is not a regular file": ODD})
def test_other_things_in_place_of_a_segment_are_refused(store, name, damage, message):
    damage(store / name)
    if name.endswith("partial"):
        use_everything(store)  # only who writes opens it
    else:
        with pytest.raises(StoreError, match=f"{name} {message}"):
            Archive.open(store, BINDING)
    with pytest.raises(StoreError, match=f"{name} {message}"):
        Archive.open(store, BINDING, writable=True)


def test_file_in_place_of_the_directory_is_refused(tmp_path):
    (tmp_path / "store").write_text("mine")
    for writable in (False, True):
        with pytest.raises(StoreError, match="datastore"):
            Archive.open(tmp_path / "store", BINDING, writable=writable)
    assert (tmp_path / "store").read_text() == "mine"


def test_files_of_others_are_left_alone(store):
    for name in ("notes.txt", "x.partial", "000000.segment", "0.0.segment", "000001.0.segment.bak"):
        (store / name).write_text("mine")
    with Archive.open(store, BINDING, writable=True) as archive:
        archive.forget(archive.ids())
    assert len([path for path in store.iterdir() if path.read_bytes() == b"mine"]) == 5
