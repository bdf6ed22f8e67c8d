"""Selected datastores of random pairs, and brute-force search in them."""

from __future__ import annotations

import numpy as np

from llmaas_plugins.knn_lm.datastore.datastore import Datastore
from llmaas_plugins.knn_lm.datastore.file import DatastoreFile, write_file

MODEL = bytes(range(32))
CONVERSATIONS = ["rome", "paris", "oslo"]


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


def counts_of(path):
    file = DatastoreFile(path)
    file.close()
    return file.counts


def rewrite(path, **arrays):
    """Write the file again with other arrays and their correct checksums."""
    file = DatastoreFile(path)
    found = {name: file.read(name) for name in file.counts.arrays()} | arrays
    counts = file.counts._replace(n_text=len(found["text"]))
    write_file(path, file.fingerprint, counts, found, [file.read_keys(0, counts.n_rows)])
    file.close()
