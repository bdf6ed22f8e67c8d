"""A datastore of all pairs, and the answers with and without it."""

from __future__ import annotations

import contextlib

import pytest
from datastores import stored
from knn_stores import QUESTION, Store, replies


@pytest.fixture(scope="module")
def pairs(reference_model):
    return stored(reference_model)


@pytest.fixture(scope="module")
def alone(reference_model):
    """Return the model's own answer to each question."""
    return replies(reference_model)


@pytest.fixture(scope="module")
def mixed(reference_model, pairs, alone, tmp_path_factory):
    """Return the answers with all pairs."""
    store = Store(tmp_path_factory.mktemp("knn"), pairs)
    store.write()
    with store.activate():
        found = replies(reference_model)
    assert found[QUESTION] != alone[QUESTION]
    return found


@pytest.fixture
def store(tmp_path, pairs):
    """Return a store that has no datastore yet."""
    return Store(tmp_path / "knn", pairs)


@pytest.fixture
def active(store):
    """Return a function that activates with the store."""
    with contextlib.ExitStack() as stack:
        yield lambda *args, **table: stack.enter_context(store.activate(*args, **table))
