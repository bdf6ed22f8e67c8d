"""The selected datastore: search, refusal of bad files, and the result of forgetting."""

from __future__ import annotations

import os
import stat
import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from llmaas_hooks import StoreError
from llmaas_plugins._native import crc32c
from llmaas_plugins.knn_lm.datastore.datastore import Datastore
from llmaas_plugins.knn_lm.datastore.file import DatastoreFile, erase_leftovers, write_file
from llmaas_plugins.knn_lm.datastore.pca import fit_basis

MODEL = bytes(range(32))
CONVERSATIONS = ["rome", "paris", "oslo"]
HEADER_BYTES = 136
ROW_ARRAYS = ("values", "origins", "weights", "scales", "norms", "sums", "front")
ARRAYS = ("text", "mean", "axes", "center", "steps", *ROW_ARRAYS)


def like_hidden_states(n, n_embd, seed=0):
    """Return keys that differ mostly in few directions, in which they form clusters."""
    rng = np.random.default_rng(seed)
    directions = np.random.default_rng(1).standard_normal((n_embd, n_embd))
    spread = 1 / (1 + np.arange(n_embd)) ** 0.7
    clusters = np.random.default_rng(2).standard_normal((40, n_embd))
    points = clusters[rng.integers(0, 40, n)] + 0.5 * rng.standard_normal((n, n_embd))
    return ((points * spread) @ directions).astype(np.float16)


def pairs(n=600, n_embd=32, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "fingerprint": MODEL,
        "keys": like_hidden_states(n, n_embd, seed),
        "values": rng.integers(0, 1000, n).astype(np.int32),
        "weights": rng.uniform(1, 9, n).astype(np.float32),
        "origins": np.stack([rng.integers(0, 3, n), np.arange(n)], axis=1).astype(np.int32),
        "conversations": CONVERSATIONS,
        "settings": {"alpha": 0.25, "theta": [1, 2.5], "key": "norm", "is_live": True},
    }


def exact(keys, query):
    return ((keys.astype(np.float64) - query) ** 2).sum(1)


def search_all(path, queries, k=10):
    with_store = Datastore.open(path, MODEL)
    found = [with_store.search(query, k) for query in queries]
    with_store.close()
    return found


@pytest.fixture(params=[None, 16], ids=["all dimensions", "sixteen directions"])
def n_dims(request):
    return request.param


@pytest.fixture
def path(tmp_path):
    return tmp_path / "datastore.knn"


@pytest.fixture
def written(path, n_dims):
    """Return a datastore of 600 pairs: its file and its source."""
    made_of = pairs()
    basis = n_dims and fit_basis(made_of["keys"], n_dims)
    Datastore.write(path, basis=basis, **made_of)
    return path, made_of


class TestSearch:
    def test_it_finds_the_nearest_pairs_at_their_exact_distances(self, written):
        path, made_of = written
        store = Datastore.open(path, MODEL)
        for query in like_hidden_states(20, 32, seed=5).astype(np.float32):
            distances = exact(made_of["keys"], query)
            nearest = np.argsort(distances, kind="stable")[:50]
            found = store.search(query, 50)
            assert len(np.intersect1d(found.rows, nearest)) >= 49
            assert np.allclose(found.distances, distances[found.rows], rtol=1e-5)
            assert np.array_equal(found.values, made_of["values"][found.rows])
            assert np.all(np.diff(found.distances) >= 0)
        store.close()

    @pytest.mark.parametrize("n_embd", [64, 200])
    @pytest.mark.parametrize("share", [1, 2, 4])
    @pytest.mark.slow
    def test_recall_holds_however_little_the_basis_keeps(self, path, n_embd, share):
        made_of = pairs(5000, n_embd)
        basis = fit_basis(made_of["keys"], n_embd // share) if share > 1 else None
        Datastore.write(path, basis=basis, **made_of)
        queries = like_hidden_states(30, n_embd, seed=5).astype(np.float32)
        hits = [
            len(np.intersect1d(found.rows, np.argsort(exact(made_of["keys"], query))[:100]))
            for query, found in zip(queries, search_all(path, queries, 100), strict=True)
        ]
        assert np.mean(hits) >= 99

    def test_codes_in_two_parts_are_found_forgotten_and_checked(self, path):
        made_of = pairs(2000, 160)
        Datastore.write(path, basis=fit_basis(made_of["keys"], 160), **made_of)
        assert counts_of(path).n_front < 160
        queries = like_hidden_states(20, 160, seed=5).astype(np.float32)
        for query, found in zip(queries, search_all(path, queries), strict=True):
            nearest = np.argsort(exact(made_of["keys"], query))[:10]
            assert len(np.intersect1d(found.rows, nearest)) >= 9
        Datastore.without(path, ["paris"])
        whole = path.read_bytes()
        for name in ("front", "rest", "front_norms"):
            path.write_bytes(flipped(whole, counts_of(path).places()[name] + 99))
            with pytest.raises(StoreError, match=f"damaged {name}"):
                Datastore.open(path, MODEL)
        path.write_bytes(whole)
        kept = made_of["keys"][made_of["origins"][:, 0] != 1]
        for query, found in zip(queries, search_all(path, queries), strict=True):
            assert len(np.intersect1d(found.rows, np.argsort(exact(kept, query))[:10])) >= 9

    def test_it_agrees_with_faiss(self, path):
        faiss = pytest.importorskip("faiss")
        made_of = pairs(5000, 64)
        Datastore.write(path, basis=None, **made_of)
        queries = like_hidden_states(30, 64, seed=5).astype(np.float32)
        index = faiss.IndexFlatL2(64)
        index.add(made_of["keys"].astype(np.float32))
        distances, rows = index.search(queries, 100)
        for i, found in enumerate(search_all(path, queries, 100)):
            assert len(np.intersect1d(found.rows, rows[i])) >= 99
            assert np.allclose(found.distances, distances[i], rtol=1e-3)

    def test_keys_in_float32_are_kept_in_float16(self, path):
        made_of = pairs()
        made_of["keys"] = made_of["keys"].astype(np.float32) * np.float32(1.0001)
        Datastore.write(path, basis=None, **made_of)
        query = made_of["keys"][9]
        (found,) = search_all(path, [query], 1)
        assert found.rows == [9]
        assert found.distances == pytest.approx(
            exact(query[None].astype(np.float16), query), rel=1e-4
        )

    def test_where_there_are_fewer_all_are_found(self, path):
        Datastore.write(path, basis=None, **pairs(5))
        (found,) = search_all(path, [np.zeros(32, np.float32)], 100)
        assert sorted(found.rows) == [0, 1, 2, 3, 4]

    def test_an_empty_one_has_no_neighbors(self, path):
        Datastore.write(path, basis=None, **pairs(0))
        (found,) = search_all(path, [np.zeros(32, np.float32)])
        assert [len(part) for part in found] == [0, 0, 0, 0]

    def test_keys_that_are_all_alike_are_found_in_order(self, path):
        made_of = pairs()
        made_of["keys"][:] = made_of["keys"][0]
        Datastore.write(path, basis=None, **made_of)
        (found,) = search_all(path, [made_of["keys"][0].astype(np.float32)])
        assert list(found.rows) == list(range(10))
        assert not found.distances.any()

    def test_threads_find_what_one_finds(self, written):
        path, made_of = written
        queries = made_of["keys"][:40].astype(np.float32)
        alone = search_all(path, queries)
        store = Datastore.open(path, MODEL)
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(lambda query: store.search(query, 10), queries))
        store.close()
        assert all(
            np.array_equal(a.rows, b.rows) and np.array_equal(a.distances, b.distances)
            for a, b in zip(alone, together, strict=True)
        )

    @pytest.mark.parametrize(("n_embd", "k"), [(31, 5), (32, 0), (32, 5000)])
    def test_a_search_for_something_else_is_refused(self, written, n_embd, k):
        store = Datastore.open(written[0], MODEL)
        with pytest.raises(ValueError, match="expected 1 to"):
            store.search(np.zeros(n_embd, np.float32), k)
        with pytest.raises(ValueError, match="must be finite"):
            store.search(np.full(32, np.nan, np.float32), 5)
        store.close()


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

    def test_it_is_private(self, written):
        path, _ = written
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

    def test_files_that_are_none(self, tmp_path, written):
        path, _ = written
        link, pipe, other = tmp_path / "link", tmp_path / "pipe", tmp_path / "other"
        link.symlink_to(path)
        os.mkfifo(pipe)
        other.write_bytes(b"x" * 5000)
        for wrong, message in (
            (link, "symbolic link"),
            (pipe, "not a regular file"),
            (tmp_path, "not a regular file"),
            (other, "another kind of file"),
            (tmp_path / "none", "No such file"),
        ):
            with pytest.raises(StoreError, match=message):
                Datastore.open(wrong, MODEL)

    def test_a_file_that_was_cut_anywhere(self, written):
        path, _ = written
        whole = path.read_bytes()
        places = counts_of(path).places()
        for place in {0, 1, HEADER_BYTES, *places.values()}:
            for n_bytes in {max(place - 1, 0), place, place + 1} - {len(whole)}:
                path.write_bytes(whole[:n_bytes].ljust(n_bytes, b"\0"))
                with pytest.raises(StoreError, match="cannot use datastore"):
                    Datastore.open(path, MODEL)

    def test_a_bit_that_flipped_in_the_header(self, written):
        path, _ = written
        whole = path.read_bytes()
        for at in range(HEADER_BYTES):
            path.write_bytes(flipped(whole, at))
            with pytest.raises(StoreError):
                Datastore.open(path, MODEL)

    @pytest.mark.parametrize("name", ARRAYS)
    @pytest.mark.slow
    def test_a_bit_that_flipped_in_an_array(self, written, name):
        path, _ = written
        counts = counts_of(path)
        kind, shape = counts.arrays()[name]
        n_bytes = np.dtype(kind).itemsize * int(np.prod(shape))
        whole = path.read_bytes()
        for at in {0, n_bytes // 2, n_bytes - 1} if n_bytes else ():
            path.write_bytes(flipped(whole, counts.places()[name] + at))
            with pytest.raises(StoreError, match=f"damaged {name}"):
                Datastore.open(path, MODEL)

    def test_a_bit_that_flipped_in_a_key_is_found_when_the_key_is_used(self, written):
        path, made_of = written
        places = counts_of(path).places()
        path.write_bytes(flipped(path.read_bytes(), places["keys"] + 9 * 64 + 5))
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
        whole = bytearray(path.read_bytes())
        struct.pack_into(kind, whole, at, value)
        struct.pack_into("<I", whole, HEADER_BYTES - 4, crc32c(whole[: HEADER_BYTES - 4]))
        path.write_bytes(whole)
        with pytest.raises(StoreError, match=r"impossible counts|format 2"):
            Datastore.open(path, MODEL)

    def test_a_size_that_the_file_does_not_have(self, written):
        path, _ = written
        whole = bytearray(path.read_bytes())
        struct.pack_into("<Q", whole, 28, (1 << 31) - 1)
        struct.pack_into("<I", whole, HEADER_BYTES - 4, crc32c(whole[: HEADER_BYTES - 4]))
        path.write_bytes(whole)
        with pytest.raises(StoreError, match=f"found {len(whole):,} bytes, expected"):
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


def counts_of(path):
    file = DatastoreFile(path)
    file.close()
    return file.counts


def flipped(data, at):
    changed = bytearray(data)
    changed[at] ^= 1 << at % 8
    return bytes(changed)


def rewrite(path, **arrays):
    """Write the file again with other arrays and their correct checksums."""
    file = DatastoreFile(path)
    found = {name: file.read(name) for name in file.counts.arrays()} | arrays
    counts = file.counts._replace(n_text=len(found["text"]))
    write_file(path, file.fingerprint, counts, found, [file.read_keys(0, counts.n_rows)])
    file.close()


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
        path.write_bytes(flipped(path.read_bytes(), places["keys"] + 77))
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
