"""The selected datastore's file, and the result of forgetting conversations."""

from __future__ import annotations

import os
import stat

import numpy as np
import pytest
from damages import flip
from selected import (
    CONVERSATIONS,
    MODEL,
    counts_of,
    exact,
    pairs,
    search_all,
)

from llmaas_hooks import StoreError
from llmaas_plugins.knn_lm.datastore.datastore import Datastore
from llmaas_plugins.knn_lm.datastore.file import erase_leftovers


class TestFile:
    def test_what_was_written_is_there_again(self, written):
        path, made_of = written
        store = Datastore.open(path, MODEL)
        assert len(store) == 600
        assert store.n_embd == 32
        assert store.fingerprint == MODEL
        assert store.conversations == tuple(CONVERSATIONS)
        assert store.settings == made_of["settings"]
        assert np.array_equal(store.values, made_of["values"])
        assert np.array_equal(store.origins, made_of["origins"])
        store.close()
        store.close()

    def test_its_keys_are_not_in_memory(self, path):
        Datastore.write(path, basis=None, **pairs(2000, 256))
        store = Datastore.open(path, MODEL)
        assert store.memory_bytes < 2000 * (256 + 40)
        assert path.stat().st_size > 2000 * 3 * 256
        store.close()

    def test_it_is_private(self, path):
        Datastore.write(path, basis=None, **pairs())
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert list(path.parent.iterdir()) == [path]

    def test_a_new_one_replaces_it_while_the_old_one_is_used(self, written):
        path, _ = written
        old = Datastore.open(path, MODEL)
        before = old.search(np.zeros(32, np.float32), 10)
        assert old.is_current()
        Datastore.write(path, basis=None, **pairs(50))
        assert not old.is_current()
        assert np.array_equal(old.search(np.zeros(32, np.float32), 10).rows, before.rows)
        old.close()
        new = Datastore.open(path, MODEL)
        assert len(new) == 50
        new.close()

    @pytest.mark.parametrize("value", [np.inf, np.nan, 1e6])
    def test_keys_that_are_not_finite_are_refused_and_the_old_file_stays(self, written, value):
        path, made_of = written
        before = path.read_bytes()
        made_of["keys"] = made_of["keys"].astype(np.float32)
        made_of["keys"][590, 3] = value
        with pytest.raises(ValueError, match="finite in float16"):
            Datastore.write(path, basis=None, **made_of)
        assert path.read_bytes() == before

    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("fingerprint", b"short", "fingerprint: found 5, expected 32"),
            ("values", np.zeros(599, np.int32), "shape of values"),
            ("values", np.full(600, -1, np.int32), "tokens below 0: found 600"),
            ("origins", np.zeros(600, np.int32), "shape of origins"),
            ("origins", np.full((600, 2), 3, np.int32), "pairs of no conversation: found 600"),
            ("conversations", ["a", "b", "a"], "named twice: found 1"),
            ("settings", {"alpha": float("nan")}, "JSON"),
        ],
    )
    def test_what_does_not_fit_together_is_refused(self, path, name, value, message):
        with pytest.raises(ValueError, match=message):
            Datastore.write(path, basis=None, **pairs() | {name: value})
        assert not path.exists()

    def test_where_nothing_can_be_written_it_says_so(self, tmp_path):
        with pytest.raises(StoreError, match=r"No such file|not a directory|cannot"):
            Datastore.write(tmp_path / "no" / "datastore.knn", basis=None, **pairs())


class TestForgetting:
    def test_the_others_are_found_as_before(self, written):
        path, made_of = written
        kept = np.flatnonzero(made_of["origins"][:, 0] != 1)
        assert Datastore.without(path, ["paris"]) == 600 - len(kept)

        store = Datastore.open(path, MODEL)
        assert store.conversations == ("rome", "oslo")
        assert store.settings == made_of["settings"]
        assert np.array_equal(store.values, made_of["values"][kept])
        assert np.array_equal(store.origins[:, 1], made_of["origins"][kept, 1])
        names = [CONVERSATIONS[i] for i in made_of["origins"][kept, 0]]
        assert [store.conversations[i] for i in store.origins[:, 0]] == names
        for query in made_of["keys"][:30].astype(np.float32):
            found = store.search(query, 20)
            distances = exact(made_of["keys"][kept], query)
            assert len(np.intersect1d(found.rows, np.argsort(distances)[:20])) >= 19
        store.close()

    def test_nothing_of_it_is_left_on_the_disk(self, written):
        path, made_of = written
        fd = os.open(path, os.O_RDONLY)
        n_bytes = os.fstat(fd).st_size
        Datastore.without(path, ["paris", "never heard of"])
        assert os.pread(fd, n_bytes + 1, 0) == bytes(n_bytes)
        os.close(fd)
        assert list(path.parent.iterdir()) == [path]
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        left = path.read_bytes()
        assert b"paris" not in left
        for row in np.flatnonzero(made_of["origins"][:, 0] == 1):
            assert made_of["keys"][row].tobytes() not in left

    def test_who_has_the_old_file_open_is_told(self, written):
        path, made_of = written
        old = Datastore.open(path, MODEL)
        Datastore.without(path, ["paris"])
        assert not old.is_current()
        with pytest.raises(StoreError, match="damaged key"):
            old.search(made_of["keys"][0].astype(np.float32), 3)
        old.close()

    def test_all_can_be_forgotten(self, written):
        path, _ = written
        assert Datastore.without(path, CONVERSATIONS) == 600
        (found,) = search_all(path, [np.zeros(32, np.float32)])
        assert len(found.rows) == 0

    def test_what_was_never_there_changes_nothing(self, written):
        path, _ = written
        before = path.stat()
        assert Datastore.without(path, ["berlin"]) == 0
        assert os.path.samestat(path.stat(), before)

    def test_a_damaged_file_stays_as_it_is(self, written):
        path, _ = written
        places = counts_of(path).places()
        flip(path, places["keys"] + 77)
        before = path.read_bytes()
        with pytest.raises(StoreError, match="damaged key"):
            Datastore.without(path, ["paris"])
        assert path.read_bytes() == before
        assert list(path.parent.iterdir()) == [path]

    def test_what_a_crash_left_is_erased(self, written):
        path, _ = written
        before = path.read_bytes()
        partial, dropped = (path.with_name(path.name + end) for end in (".partial", ".dropped"))
        partial.write_bytes(b"secret" * 1000)
        dropped.write_bytes(b"secret" * 1000)
        fds = [os.open(leftover, os.O_RDONLY) for leftover in (partial, dropped)]
        erase_leftovers(path)
        for fd in fds:
            assert os.pread(fd, 6001, 0) == bytes(6000)
            os.close(fd)
        assert list(path.parent.iterdir()) == [path]
        assert path.read_bytes() == before

    def test_a_crash_before_the_new_file_was_in_place_leaves_the_old_one(self, written):
        path, _ = written
        before = path.read_bytes()
        path.with_name(path.name + ".dropped").hardlink_to(path)
        erase_leftovers(path)
        assert path.read_bytes() == before
        assert list(path.parent.iterdir()) == [path]
