"""A datastore of all pairs, and requests that are mixed with it or not."""

from __future__ import annotations

import contextlib

import pytest
from datastores import K, stored

import llmaas_plugins
from llmaas_plugins import activate


@pytest.fixture(scope="module")
def pairs(reference_model):
    return stored(reference_model)


@pytest.fixture
def store(pairs, tmp_path):
    pairs.write(tmp_path / "knn")
    return tmp_path / "knn"


@pytest.fixture
def mixing(store):
    """Return a function that activates with the datastore; each activation is a new life."""
    with contextlib.ExitStack() as stack:

        def start(witness=None, plugins=(), **table):
            stack.close()
            own = {"store": str(store), "k": K, "look_back": 0} | table
            config = {"on_error": "raise", "plugins": {"knn_lm": own, **dict(plugins)}}
            listeners = {} if witness is None else {"witness": witness}
            return stack.enter_context(activate(config, listeners))

        yield start


@pytest.fixture
def vanilla(make):
    """Return a function that runs stock llama-cpp-python's sampling on a similar engine."""

    def ask(does, **engine):
        assert llmaas_plugins.active_suite() is None
        with contextlib.closing(make(**engine)) as llama:
            return does(llama)

    return ask
