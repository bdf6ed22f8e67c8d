"""The index for very large datastores: approximate neighbors with exact distances."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from llmaas_hooks import ConfigError
from llmaas_plugins.knn_lm.datastore.datastore import Datastore
from llmaas_plugins.knn_lm.datastore.pca import fit_basis

MODEL = bytes(range(32))


def like_hidden_states(n, n_embd, seed=0):
    """Return keys in clusters."""
    rng = np.random.default_rng(seed)
    centers = np.random.default_rng(2).standard_normal((40, n_embd))
    points = centers[rng.integers(0, 40, n)] + 0.5 * rng.standard_normal((n, n_embd))
    return points.astype(np.float16)


def pairs(n, n_embd=32):
    return {
        "fingerprint": MODEL,
        "keys": like_hidden_states(n, n_embd),
        "values": np.arange(n, dtype=np.int32),
        "origins": np.zeros((n, 2), np.int32),
        "conversations": ["one"],
        "settings": {},
    }


@pytest.fixture
def path(tmp_path):
    return tmp_path / "datastore.knn"


@pytest.mark.slow
@pytest.mark.parametrize("n_dims", [None, 32])
def test_most_neighbors_are_found_and_their_distances_are_exact(path, n_dims):
    pytest.importorskip("faiss")
    made_of = pairs(20_000, 64)
    basis = None if n_dims is None else fit_basis(made_of["keys"], n_dims)
    Datastore.write(path, basis=basis, **made_of)
    exact, about = Datastore.open(path, MODEL), Datastore.open(path, MODEL, "faiss")
    shares = []
    for query in like_hidden_states(20, 64, seed=5).astype(np.float32):
        all_, some = exact.search(query, 20), about.search(query, 20)
        shares.append(len(np.intersect1d(all_.rows, some.rows)) / 20)
        both = np.isin(some.rows, all_.rows)
        of_all = dict(zip(all_.rows.tolist(), all_.distances.tolist(), strict=True))
        assert [of_all[row] for row in some.rows[both].tolist()] == some.distances[both].tolist()
    assert np.mean(shares) > 0.8
    assert about.memory_bytes > 20_000 * (n_dims or 64)
    exact.close()
    about.close()


def test_a_small_datastore_is_indexed_without_a_warning(path, capfd):
    pytest.importorskip("faiss")
    made_of = pairs(75)
    Datastore.write(path, basis=None, **made_of)
    about = Datastore.open(path, MODEL, "faiss")
    assert 7 in about.search(made_of["keys"][7].astype(np.float32), 5).rows
    about.close()
    assert capfd.readouterr() == ("", "")


def test_a_few_pairs_are_no_fewer(path):
    pytest.importorskip("faiss")
    Datastore.write(path, basis=None, **pairs(5))
    store = Datastore.open(path, MODEL, "faiss")
    assert len(store.search(np.zeros(32, np.float32), 100).rows) <= 5
    store.close()


def test_without_faiss_it_says_what_to_install(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    Datastore.write(path, basis=None, **pairs(5))
    with pytest.raises(ConfigError, match=r"pip install 'llmaas-plugins\[faiss\]'"):
        Datastore.open(path, MODEL, "faiss")
