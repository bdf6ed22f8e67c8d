"""Selected datastores that are damaged, foreign or impossible are refused."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest
from damages import FOREIGN, LINKS, ODD, cuts, each_told, flip, flips, overwrite
from selected import (
    MODEL,
    counts_of,
    rewrite,
    search_all,
)

from llmaas_hooks import StoreError
from llmaas_plugins._native import crc32c
from llmaas_plugins.knn_lm.datastore.datastore import Datastore
from llmaas_plugins.knn_lm.datastore.file import DatastoreFile, write_file

HEADER_BYTES = 136
ROW_ARRAYS = ("values", "origins", "weights", "scales", "norms", "sums", "front")
ARRAYS = ("text", "mean", "axes", "center", "steps", *ROW_ARRAYS)


def overwrite_header(path, at, data):
    """Change the header, and give it the right checksum."""
    overwrite(path, at, data)
    header = path.read_bytes()[: HEADER_BYTES - 4]
    overwrite(path, len(header), struct.pack("<I", crc32c(header)))


class TestRefusals:
    def test_another_models_datastore(self, written):
        path, _ = written
        with pytest.raises(StoreError) as caught:
            Datastore.open(path, bytes(32))
        assert MODEL.hex()[:16] in str(caught.value)
        assert "0000000000000000" in str(caught.value)
        assert "llmaas datastore build" in str(caught.value)

    def test_any_models_datastore_opens_for_those_who_only_look(self, written):
        store = Datastore.open(written[0], None)
        assert store.fingerprint == MODEL
        store.close()

    @each_told(
        {
            "symbolic link": LINKS,
            "not a regular file": ODD,
            "another kind of file|bytes, expected": FOREIGN,
            "No such file": {"missing": Path.unlink},
        }
    )
    def test_files_that_are_none(self, written, damage, message):
        damage(written[0])
        with pytest.raises(StoreError, match=message):
            Datastore.open(written[0], MODEL)

    def test_a_file_that_was_cut_anywhere(self, written):
        path, _ = written
        places = {0, 1, HEADER_BYTES, *counts_of(path).places().values()}
        sizes = {max(place + i, 0) for place in places for i in (-1, 0, 1)}
        for _ in cuts(path, sizes - {path.stat().st_size}):
            with pytest.raises(StoreError, match="cannot use datastore"):
                Datastore.open(path, MODEL)

    def test_a_bit_that_flipped_in_the_header(self, written):
        path, _ = written
        for _ in flips(path, range(HEADER_BYTES)):
            with pytest.raises(StoreError):
                Datastore.open(path, MODEL)

    @pytest.mark.parametrize("name", ARRAYS)
    @pytest.mark.slow
    def test_a_bit_that_flipped_in_an_array(self, written, name):
        path, _ = written
        counts = counts_of(path)
        kind, shape = counts.arrays()[name]
        n_bytes = np.dtype(kind).itemsize * int(np.prod(shape))
        first = counts.places()[name]
        offsets = {0, n_bytes // 2, n_bytes - 1} if n_bytes else ()
        for _ in flips(path, [first + at for at in offsets]):
            with pytest.raises(StoreError, match=f"damaged {name}"):
                Datastore.open(path, MODEL)

    def test_a_bit_that_flipped_in_a_key_is_found_when_the_key_is_used(self, written):
        path, made_of = written
        places = counts_of(path).places()
        flip(path, places["keys"] + 9 * 64 + 5)
        store = Datastore.open(path, MODEL)
        with pytest.raises(StoreError, match=r"damaged key.*llmaas datastore select"):
            store.search(made_of["keys"][9].astype(np.float32), 3)
        store.close()

    def test_a_file_that_shrinks_while_it_is_open(self, written):
        path, made_of = written
        store = Datastore.open(path, MODEL)
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(StoreError, match="cannot be read"):
            store.search(made_of["keys"][599].astype(np.float32), 3)
        store.close()

    @pytest.mark.parametrize(
        ("at", "kind", "value"),
        [
            (8, "<I", 2),  # another version
            (12, "<I", 0),  # no numbers in a key
            (12, "<I", 1 << 31),  # more than any model has
            (16, "<I", 33),  # more in a code than in a key
            (20, "<I", 0),  # no codes in front
            (20, "<I", 65),
            (20, "<I", 1 << 31),
            (24, "<I", 7),  # a basis that is not the codes'
            (28, "<Q", 1 << 31),  # more rows than can be counted
            (28, "<Q", 1 << 60),
            (28, "<Q", (1 << 64) - 1),
            (36, "<Q", 1 << 40),  # text without end
        ],
    )
    @pytest.mark.slow
    def test_counts_no_writer_writes_in_a_header_whose_sum_is_right(self, written, at, kind, value):
        path, _ = written
        overwrite_header(path, at, struct.pack(kind, value))
        with pytest.raises(StoreError, match=r"impossible counts|format 2"):
            Datastore.open(path, MODEL)

    def test_a_size_that_the_file_does_not_have(self, written):
        path, _ = written
        overwrite_header(path, 28, struct.pack("<Q", (1 << 31) - 1))
        with pytest.raises(StoreError, match=f"found {path.stat().st_size:,} bytes, expected"):
            Datastore.open(path, MODEL)

    @pytest.mark.parametrize(
        "text",
        [
            b"[" * 100_000,
            b"[]",
            b"{}",
            b'{"conversations": [1], "settings": {}, "rows_per_neighbor": 1}',
            b'{"conversations": ["a", "b", "c"], "settings": [], "rows_per_neighbor": 1}',
            b'{"conversations": ["a", "b", "c"], "settings": {}, "rows_per_neighbor": 1e9}',
            b'{"conversations": ["a", "b", "c"], "settings": {}, "rows_per_neighbor": NaN}',
            b'{"conversations": ["a", "b", "c"], "settings": {}, "rows_per_neighbor": 1, "x": 2}',
            b"\xff\xff",
        ],
    )
    def test_text_of_another_form_whose_sum_is_right(self, written, text):
        rewrite(written[0], text=np.frombuffer(text, np.uint8))
        with pytest.raises(StoreError, match="in another form"):
            Datastore.open(written[0], MODEL)

    def test_pairs_of_no_token_or_no_conversation_whose_sums_are_right(self, written):
        path, made_of = written
        for name, wrong in (
            ("values", np.full(600, -5, np.int32)),
            ("origins", made_of["origins"] + np.int32(1)),
            ("origins", made_of["origins"] - np.int32(1)),
        ):
            rewrite(path, **{name: wrong})
            with pytest.raises(StoreError, match="of no conversation or token"):
                Datastore.open(path, MODEL)
            rewrite(path, **{name: made_of[name]})
        Datastore.open(path, MODEL).close()

    @pytest.mark.parametrize(
        "name", ["weights", "mean", "axes", "center", "steps", "scales", "norms", "front_norms"]
    )
    @pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 3e38, -1.0])
    @pytest.mark.slow
    def test_impossible_numbers_are_refused_when_it_is_opened(self, written, name, wrong):
        path, _ = written
        file = DatastoreFile(path)
        array = file.read(name)
        file.close()
        if array.size == 0 or (wrong == -1 and name in {"mean", "axes", "center"}):
            return
        array.reshape(-1)[array.size // 2] = wrong
        rewrite(path, **{name: array})
        with pytest.raises(StoreError, match=f"impossible {name}"):
            Datastore.open(path, MODEL)

    def test_a_pair_stands_for_some(self, written):
        path, _ = written
        rewrite(path, weights=np.zeros(600, np.float32))
        with pytest.raises(StoreError, match="impossible weights"):
            Datastore.open(path, MODEL)

    def test_keys_that_are_not_finite_are_told_when_they_are_read(self, written):
        path, made_of = written
        keys = np.full_like(made_of["keys"], np.nan)
        file = DatastoreFile(path)
        arrays = {name: file.read(name) for name in file.counts.arrays()}
        arrays["sums"] = np.array([crc32c(row.tobytes()) for row in keys], np.uint32)
        write_file(path, file.fingerprint, file.counts, arrays, [keys])
        file.close()
        with pytest.raises(StoreError, match="a key that is not finite"):
            search_all(path, made_of["keys"][:1].astype(np.float32))
