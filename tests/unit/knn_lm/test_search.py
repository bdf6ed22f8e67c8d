"""Search in the selected datastore: nearest pairs, at exact distances."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from damages import flips
from selected import (
    MODEL,
    counts_of,
    exact,
    like_hidden_states,
    pairs,
    search_all,
)

from llmaas_hooks import StoreError
from llmaas_plugins.knn_lm.datastore.datastore import Datastore
from llmaas_plugins.knn_lm.datastore.pca import fit_basis


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
        places = counts_of(path).places()
        for name in ("front", "rest", "front_norms"):
            for _ in flips(path, [places[name] + 99]):
                with pytest.raises(StoreError, match=f"damaged {name}"):
                    Datastore.open(path, MODEL)
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
