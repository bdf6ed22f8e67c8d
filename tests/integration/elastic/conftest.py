"""The prepared model, engines on it, and activations of elastic."""

from __future__ import annotations

import contextlib

import pytest
from leveled import TABLES
from llama_cpp import Llama
from preparing import prepare

from llmaas_plugins import activate
from llmaas_plugins.elastic import draft_worth


@pytest.fixture(scope="module")
def model(reference_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("elastic") / "model.gguf"
    return prepare(reference_model, path, tables=TABLES, biases=("searched",))


@pytest.fixture
def engine(model):
    """Return a function that opens a ``Llama`` on the prepared model or another one."""
    with contextlib.ExitStack() as stack:

        def engine(path=model, **settings):
            own = {"n_ctx": 256, "verbose": False, "n_threads": 1, "n_threads_batch": 1} | settings
            return stack.enter_context(contextlib.closing(Llama(str(path), **own)))

        yield engine


@pytest.fixture
def narrowing():
    """Return a function that activates; a second activation is a new life of the process."""
    with contextlib.ExitStack() as stack:

        def start(recorder=None, plugins=(), on_error="raise", **table):
            stack.close()
            own = {"table": "uniform"} | table
            config = {"on_error": on_error, "plugins": {"elastic": own, **dict(plugins)}}
            listeners = {} if recorder is None else {"recorder": recorder}
            return stack.enter_context(activate(config, listeners))

        yield start


@pytest.fixture
def drafts_always(monkeypatch):
    """Draft whatever it takes: this model's times are those of the test machine's noise."""
    monkeypatch.setattr(draft_worth, "_N_JUDGED", 10**6)
    monkeypatch.setattr(draft_worth, "_LOST_GAIN", 0.0)
    monkeypatch.setattr(draft_worth, "_N_MEASURED", 2)
    monkeypatch.setattr(draft_worth.Worth, "least_chance_a_s", 0.0)
