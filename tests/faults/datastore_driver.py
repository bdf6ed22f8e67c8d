"""A selected datastore's life with one fault at each operation in turn; see ``injection.py``."""

from __future__ import annotations

import numpy as np
from injection import drive

from llmaas_plugins.knn_lm.datastore.datastore import Datastore
from llmaas_plugins.knn_lm.datastore.file import erase_leftovers

NAME = "datastore.knn"
MODEL = bytes(range(32))
N, N_EMBD = 60, 40


def keys_of(conversation):
    """Return keys that occur in no other conversation."""
    seed = int.from_bytes(conversation.encode(), "little")
    return np.random.default_rng(seed).standard_normal((N, N_EMBD)).astype(np.float16)


def write(path, *conversations):
    Datastore.write(
        path,
        fingerprint=MODEL,
        keys=np.concatenate([keys_of(name) for name in conversations]),
        values=np.arange(N * len(conversations), dtype=np.int32),
        origins=np.stack(
            [np.repeat(range(len(conversations)), N), [0] * N * len(conversations)], 1
        ),
        conversations=conversations,
        basis=None,
        settings={},
    )


def look(path):
    """Return the conversations of a file whose keys are all unchanged."""
    store = Datastore.open(path, MODEL)
    keys = [keys_of(name) for name in store.conversations] or [np.empty((0, N_EMBD))]
    found = store.search(np.zeros(N_EMBD, np.float32), max(len(store), 1))
    expected = (np.concatenate(keys).astype(np.float64) ** 2).sum(1)
    store.close()
    assert sorted(found.rows) == list(range(len(expected)))
    assert np.allclose(found.distances, expected[found.rows], rtol=1e-5)
    return set(store.conversations)


LIFE = [
    (lambda path: write(path, "rome", "paris", "oslo"), {"rome", "paris", "oslo"}),
    (look, {"rome", "paris", "oslo"}),
    (lambda path: Datastore.without(path, {"paris"}), {"rome", "oslo"}),
    (lambda path: write(path, "bern", "rome"), {"bern", "rome"}),
    (lambda path: Datastore.without(path, {"rome", "oslo"}), {"bern"}),
]


def life(directory):
    """Run the life; yield the number of completed steps after each step."""
    directory.mkdir(exist_ok=True)
    for n_done, (step, _) in enumerate(LIFE, 1):
        step(directory / NAME)
        yield {"n_done": n_done}


def examine(directory, steps, _ending):
    """Check the surviving file, forget the doomed conversations, and describe any problem."""
    n_done = steps[-1]["n_done"] if steps else 0
    path, states = directory / NAME, [None, *(after for _, after in LIFE)]
    found = look(path) if path.exists() else None
    if found not in states[n_done : n_done + 2]:
        yield f"found {found}, expected one of {states[n_done : n_done + 2]}"
    erase_leftovers(path)
    if found:
        Datastore.without(path, {"rome", "paris"})
        if look(path) != found - {"rome", "paris"}:
            yield f"of {found}, {look(path)} are left"
    if set(directory.iterdir()) > {path}:
        yield f"left over: {sorted(file.name for file in directory.iterdir())}"
    content = b"".join(file.read_bytes() for file in directory.iterdir())
    for name in ("rome", "paris"):
        if name.encode() in content or any(key.tobytes() in content for key in keys_of(name)):
            yield f"{name} was forgotten and is still there"


if __name__ == "__main__":
    drive(life, lambda _fault, _whole: examine)
