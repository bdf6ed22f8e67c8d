"""Engines in every case, their stored contexts, and both ways to restore them."""

from __future__ import annotations

import pytest
from landing import (
    CASES,
    FOREIGN,
    PROMPT,
    opener,
)
from switching import ask

from llmaas_plugins.kv_chunks.transfer import direct_load
from llmaas_plugins.kv_chunks.transfer.cell_loader import CellLoader


@pytest.fixture(params=CASES)
def make(request, reference_model):
    return opener(reference_model, **CASES[request.param])


@pytest.fixture
def make_one(reference_model):
    return opener(reference_model)


@pytest.fixture
def stored(suite, make_one):
    """Return a function that activates and stores the prompt's chunks."""

    def store(make=make_one, **table):
        active = suite(**{"codec": "tolerance"} | table)
        with make() as llama:
            ask(llama, PROMPT, 1)
            ask(llama, FOREIGN, 1)
            active.settle()
        return active

    return store


@pytest.fixture
def ways(monkeypatch):
    """Record each restore's tokens: those sent straight to their cells, and through buffers."""
    found = []

    def watch(name, n_tokens):
        original = getattr(CellLoader, name)

        def call(self, *args):
            result = original(self, *args)
            found.append((name, n_tokens(result)))
            return result

        monkeypatch.setattr(CellLoader, name, call)

    watch("_load_directly", int)
    watch("_load_in_segments", lambda result: result[1])
    return found


@pytest.fixture
def small_pieces(monkeypatch):
    """Give the threads one chunk at a time, as if chunks were large."""
    monkeypatch.setattr(direct_load, "split_jobs", lambda chunks, _: [[chunk] for chunk in chunks])
