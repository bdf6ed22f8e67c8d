"""Adapters in prepared files: written whole or not at all; nothing in them is trusted."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
from dataclasses import replace

import numpy as np
import pytest
from damages import flip
from elastic_models import adapters_of, elastic_of, logits_of, scores_of, shuffled, write
from families import write_family
from gguf import GGMLQuantizationType

from llmaas_hooks import ConfigError, FileStamp, LlmaasError, StoreError
from llmaas_hooks.native.low_rank import MAX_RANK, LowRank
from llmaas_plugins._native import crc32c
from llmaas_plugins.elastic.adapter_index import FIELDS
from llmaas_plugins.elastic.adapters import Adapter, read_adapters, write_adapters
from llmaas_plugins.elastic.metadata import read_elastic
from llmaas_plugins.elastic.prepared_file import replace_metadata, restore, write_prepared
from llmaas_plugins.elastic.reordering import order_by
from llmaas_plugins.elastic.units import blocks_of
from llmaas_plugins.model.digest import CONTENT, content_end, file_digest
from llmaas_plugins.model.gguf_entries import entry
from llmaas_plugins.model.gguf_header import read_header

NAME = "blk.0.ffn_down.weight"
ADAPTERS = FIELDS[0]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "model.gguf"
    return write_family("llama", path, weights=GGMLQuantizationType.Q8_0)


@pytest.fixture(scope="module")
def prepared(source, tmp_path_factory):
    return shuffled(source, tmp_path_factory.mktemp("prepared") / "prepared.gguf")


@pytest.fixture(scope="module")
def given(prepared):
    return adapters_of(blocks_of(prepared), levels=[1, 4, 8], rank=3)


@pytest.fixture(scope="module")
def adapted(prepared, given, tmp_path_factory):
    path = shutil.copy(prepared, tmp_path_factory.mktemp("adapted") / "adapted.gguf")
    write(write_adapters(path, "uniform", given))
    return path


def read(path, table="uniform"):
    return read_adapters(path, read_elastic(path), table)


# -- 8 bits --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "n_columns", "n_rows"), [(1, 1, 1), (8, 100, 64), (16, 32, 31)])
@pytest.mark.parametrize("sizes", [(1e-2, 1e-6), (1e-7, 3.0), (1.0, 1.0)])
def test_products_lose_little_in_8_bits(rank, n_columns, n_rows, sizes):
    rng = np.random.default_rng(rank)
    a = rng.normal(0, sizes[0], (rank, n_columns)).astype(np.float32)
    b = rng.normal(0, sizes[1], (n_rows, rank)).astype(np.float32)
    stored_a, stored_b = LowRank.of(a, b).floats()
    assert stored_a.shape == a.shape
    assert stored_b.shape == b.shape
    error = np.linalg.norm(stored_b @ stored_a - b @ a) / np.linalg.norm(b @ a)
    assert error < 0.015


def test_stored_matrices_are_stored_again_unchanged():
    rng = np.random.default_rng(0)
    a, b = (rng.normal(0, 0.02, shape).astype(np.float32) for shape in ((8, 100), (64, 8)))
    stored = LowRank.of(a, b / 2)
    again = LowRank.of(*stored.floats())
    assert (again.a == stored.a).all()
    assert (again.b == stored.b).all()


def test_rows_that_add_nothing_are_zeros():
    a, b = np.ones((2, 40), np.float32), np.ones((33, 2), np.float32)
    a[0], b[:, 1] = 0, 0
    stored = LowRank.of(a, b)
    assert not stored.floats()[0].any()
    assert not stored.floats()[1].any()


@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [
        (np.ones((2, 3)), np.ones((3, 1)), "A has the shape"),
        (np.ones((0, 3)), np.ones((3, 0)), "A has the shape"),
        (np.ones((MAX_RANK + 1, 3)), np.ones((3, MAX_RANK + 1)), "expected at most 64"),
        (np.full((1, 3), np.nan), np.ones((3, 1)), "not finite"),
        (np.ones((1, 3)), np.full((3, 1), np.inf), "not finite"),
        (np.full((1, 3), 1e30), np.full((3, 1), 1e30), "too large"),
    ],
)
def test_matrices_that_are_no_adapter_are_refused(a, b, reason):
    with pytest.raises(ValueError, match=reason):
        LowRank.of(a.astype(np.float32), b.astype(np.float32))


# -- the file ------------------------------------------------------------------------------------


def test_adapters_are_read_back_at_their_levels_widths(adapted, given):
    found, elastic = read(adapted), read_elastic(adapted)
    blocks = elastic.blocks
    assert found.keys() == given.keys()
    for level, weights in found.items():
        widths = elastic.tables["uniform"][level]
        assert weights.keys() == given[level].keys()
        for name, one in weights.items():
            n_units = int(widths.neurons[int(name.split(".")[1])])
            if "attn" in name:
                n_units = int(widths.groups[int(name.split(".")[1])]) * blocks.group_width
            n_rows, n_columns = (
                (blocks.n_embd, n_units)
                if "down" in name or "output" in name
                else (n_units, blocks.n_embd)
            )
            a, b = one.floats()
            expected = given[level][name].b[:n_rows] @ given[level][name].a[:, :n_columns]
            assert np.abs(b @ a - expected).max() < 0.02 * np.abs(expected).max()
    assert elastic.adapters["uniform"].rank == 3


def test_every_other_byte_stays(prepared, adapted):
    before, after = read_header(prepared), read_header(adapted)
    assert [*before.fields, *FIELDS] == list(after.fields)
    old, new = prepared.read_bytes(), adapted.read_bytes()
    for key, (first, last) in before.spans.items():
        assert old[first:last] == new[slice(*after.spans[key])]
    assert old[before.data_at :] == new[after.data_at : content_end(after)]


def test_the_model_stays_the_same(prepared, adapted, given, tmp_path):
    assert file_digest(adapted) == file_digest(prepared)
    path = shutil.copy(adapted, tmp_path / "a.gguf")
    write(write_adapters(path, "uniform", {1: given[4]}))
    assert file_digest(path) == file_digest(prepared)
    with path.open("ab") as file:
        file.write(b"more")
    assert file_digest(path) == file_digest(prepared)


def test_new_widths_leave_the_adapters_behind(prepared, adapted, tmp_path):
    path = shutil.copy(adapted, tmp_path / "a.gguf")
    write(replace_metadata(path, read_elastic(path)))
    assert path.read_bytes() == prepared.read_bytes()


@pytest.mark.parametrize("n_bytes", [0, 1, -1, 1 << 62, "all but the last tensor"])
def test_tensors_count_whatever_the_file_says(prepared, tmp_path, n_bytes):
    """Otherwise a file could pass for another model."""
    header, found = read_header(prepared), set()
    if isinstance(n_bytes, str):
        n_bytes = max(tensor.at for tensor in header.tensors.values()) - header.data_at
    path = tmp_path / "a.gguf"
    for last in (b"\0", b"\1"):
        path.write_bytes(prepared.read_bytes()[:-1] + last)
        with_fields(path, [entry(CONTENT, np.array([n_bytes], np.int64))])
        found.add(file_digest(path))
    assert len(found) == 2


def test_the_source_is_restored(source, adapted, tmp_path):
    write(restore(adapted, tmp_path / "restored.gguf"))
    assert (tmp_path / "restored.gguf").read_bytes() == source.read_bytes()


def test_adapters_are_replaced_and_removed(prepared, adapted, given, tmp_path):
    path = shutil.copy(adapted, tmp_path / "a.gguf")
    other = {2: {NAME: given[4][NAME]}}
    write(write_adapters(path, "uniform", other))
    assert {level: list(weights) for level, weights in read(path).items()} == {2: [NAME]}
    write(write_adapters(path, "uniform", given))
    assert path.read_bytes() == adapted.read_bytes()
    write(write_adapters(path, "uniform", {}))
    assert path.read_bytes() == prepared.read_bytes()
    assert read(path) == {}


@pytest.fixture
def of_two_tables(source, tmp_path):
    blocks = blocks_of(source)
    elastic = elastic_of(blocks)
    elastic = replace(elastic, tables=elastic.tables | {"searched": elastic.tables["uniform"]})
    path = tmp_path / "a.gguf"
    write(write_prepared(source, path, elastic, order_by(blocks, scores_of(blocks))))
    return path


def test_each_table_has_adapters_of_its_own(of_two_tables, given):
    path = of_two_tables
    write(write_adapters(path, "searched", given))
    write(write_adapters(path, "uniform", {1: given[1]}))
    assert read(path, "searched").keys() == given.keys()
    assert read(path, "uniform").keys() == {1}
    write(write_adapters(path, "searched", {}))
    assert read(path, "uniform").keys() == {1}


def test_damaged_adapters_of_another_table_are_left_out(of_two_tables, given, caplog):
    path = of_two_tables
    write(write_adapters(path, "searched", {1: given[1]}))
    flip(path, path.stat().st_size - 1)
    write(write_adapters(path, "uniform", {4: given[4]}))
    assert read(path).keys() == {4}
    assert read(path, "searched") == {}
    (said,) = caplog.messages
    assert said.startswith(f"adapters of the table 'searched' are left out: the adapters of {path}")


CHANGED = "was replaced or changed while its adapters were learned; they were not written. Run"


def test_a_file_that_was_replaced_since_learning_began_stays(prepared, given, tmp_path):
    path = shutil.copy(prepared, tmp_path / "a.gguf")
    stamp = FileStamp.at(path)
    shutil.copy(prepared, tmp_path / "b.gguf").replace(path)
    with pytest.raises(StoreError, match=CHANGED):
        write(write_adapters(path, "uniform", given, stamp))
    assert path.read_bytes() == prepared.read_bytes()
    write(write_adapters(path, "uniform", given, FileStamp.at(path)))
    assert read(path)


def test_a_file_that_is_changed_while_it_is_written_stays(prepared, given, tmp_path):
    path = shutil.copy(prepared, tmp_path / "a.gguf")
    writing = write_adapters(path, "uniform", given)
    next(writing)
    os.utime(path, ns=(0, 0))
    with pytest.raises(StoreError, match=CHANGED):
        write(writing)
    assert path.read_bytes() == prepared.read_bytes()
    assert [each.name for each in tmp_path.iterdir()] == ["a.gguf"]


def test_llama_cpp_loads_the_file_and_keeps_its_metadata_short(prepared, adapted):
    import llama_cpp

    np.testing.assert_array_equal(logits_of(adapted), logits_of(prepared))
    llama = llama_cpp.Llama(str(adapted), n_ctx=64, verbose=False)
    assert len(llama.metadata[ADAPTERS]) < 300
    llama.close()


# -- refusals ------------------------------------------------------------------------------------


def test_what_cannot_have_adapters_is_refused(source, prepared, given, tmp_path):
    path = shutil.copy(prepared, tmp_path / "a.gguf")
    one = given[1][NAME]
    with pytest.raises(ConfigError, match=r"is not prepared, so it cannot have adapters"):
        write(write_adapters(source, "uniform", given))
    with pytest.raises(ConfigError, match=r"has no table 'searched'"):
        write(write_adapters(path, "searched", given))
    with pytest.raises(ConfigError, match=r"level 0 cannot have adapters: expected 1 to 8"):
        write(write_adapters(path, "uniform", {0: given[1]}))
    with pytest.raises(ConfigError, match=r"blk\.0\.attn_k\.weight cannot have adapters"):
        write(write_adapters(path, "uniform", {1: {"blk.0.attn_k.weight": one}}))
    with pytest.raises(ConfigError, match=r"has the shape \(\d+, \d+\), expected"):
        write(write_adapters(path, "uniform", {1: {NAME: Adapter(one.a[:, 1:], one.b)}}))
    with pytest.raises(ConfigError, match=r"ffn_down\.weight cannot be stored: it has values that"):
        write(write_adapters(path, "uniform", {1: {NAME: Adapter(one.a * np.nan, one.b)}}))
    assert path.read_bytes() == prepared.read_bytes()


def test_adapters_of_other_widths_are_refused(adapted, given, tmp_path):
    path = shutil.copy(adapted, tmp_path / "a.gguf")
    index = json.loads(read_header(path).fields[ADAPTERS])
    index["tables"]["uniform"]["widths"] = "0" * 64
    with_index(path, index)
    elastic = read_elastic(path)
    with pytest.raises(ConfigError, match=r"for other widths .*`llmaas elastic recover`"):
        read_adapters(path, elastic, "uniform")
    write(write_adapters(path, "uniform", given))
    assert path.read_bytes() == adapted.read_bytes()


@pytest.mark.parametrize("n_left", [0, 1, 1000])
def test_a_file_that_lost_its_adapters_says_so(adapted, tmp_path, n_left):
    path = shutil.copy(adapted, tmp_path / "a.gguf")
    with path.open("r+b") as file:
        file.truncate(content_end(read_header(adapted)) + n_left)
    with pytest.raises(StoreError, match=r"lacks its adapters: .*`llmaas elastic recover`"):
        read(path)


def test_flipped_bits_are_noticed(adapted, tmp_path):
    path = shutil.copy(adapted, tmp_path / "a.gguf")
    first, last = content_end(read_header(path)), path.stat().st_size
    for at in np.random.default_rng(0).integers(first, last, 20):
        flip(path, int(at))
        with pytest.raises(StoreError, match=r"the adapters of .* are damaged"):
            read(path)
        flip(path, int(at))
    read(path)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"at": -1},
        {"n_bytes": 1 << 60},
        {"n_bytes": 1 << 40},
        {"crc32c": 1 << 32},
        {"rank": 0},
        {"rank": MAX_RANK + 1},
        {"widths": "x"},
        {"more": 1},
    ],
    ids=str,
)
def test_a_hostile_index_is_refused(adapted, tmp_path, change):
    path = shutil.copy(adapted, tmp_path / "a.gguf")
    index = json.loads(read_header(path).fields[ADAPTERS])
    (index if change.keys() & index.keys() else index["tables"]["uniform"]).update(change)
    with_index(path, index)
    with pytest.raises((ConfigError, StoreError)) as caught:
        read(path)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_hostile_adapters_with_a_right_checksum_are_read_or_refused(adapted, tmp_path):
    path = shutil.copy(adapted, tmp_path / "a.gguf")
    header = read_header(path)
    content = bytearray(path.read_bytes()[content_end(header) :])
    n_entries = struct.unpack_from("<Q", content)[0]
    rng, n_refused = np.random.default_rng(0), 0
    for i in range(300):
        damaged = bytearray(content)
        for at in rng.integers(
            0, 8 + 12 * n_entries if i % 2 else len(content), rng.integers(1, 4)
        ):
            damaged[at] = rng.integers(256)
        del damaged[len(damaged) - (i % 7 == 0) * int(rng.integers(len(damaged))) :]
        with_adapters(path, adapted, bytes(damaged))
        with contextlib.suppress(LlmaasError):
            read(path)
            n_refused -= 1
        n_refused += 1
    assert n_refused > 100


def with_index(path, index):
    """Write another index into a file, keeping its adapters."""
    n_bytes = read_header(path).fields[CONTENT]
    with_fields(path, [entry(ADAPTERS, json.dumps(index)), entry(CONTENT, n_bytes)])


def with_fields(path, entries):
    """Write these fields in place of the adapters' own into a file."""
    header, content = read_header(path), path.read_bytes()
    fields = [content[a:b] for key, (a, b) in header.spans.items() if key not in FIELDS]
    count = struct.pack("<Q", len(fields) + len(entries))
    infos = content[header.infos_at : header.infos_end]
    start = b"".join([content[:16], count, *fields, *entries, infos])
    start += bytes(-len(start) % header.alignment)
    path.write_bytes(start + content[header.data_at :])


def with_adapters(path, adapted, content):
    """Write a copy of a file with other bytes as its adapters, and the right checksum."""
    header = read_header(adapted)
    index = json.loads(header.fields[ADAPTERS])
    index["tables"]["uniform"] |= {"n_bytes": len(content), "crc32c": crc32c(content)}
    path.write_bytes(adapted.read_bytes()[: content_end(header)] + content)
    with_index(path, index)
