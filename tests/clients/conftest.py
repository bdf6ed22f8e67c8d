"""An app run on stock llama.cpp and with the suite; both runs must give the same results."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
from llama_cpp import Llama

from llmaas_plugins import activate


@pytest.fixture(scope="session")
def reference_model(light_model):
    """Return a light model: apps must get the same from both runs, whatever it is."""
    return light_model


@pytest.fixture
def subjects():
    """Return two users' first messages, each longer than a chunk and so worth keeping."""
    return (
        "My name is Anna and I live in a small house near the station. Tell me about your dog.",
        "My name is Bert and I work for a bank in a large city. I want to fly to Rome.",
    )


@pytest.fixture
def engine():
    """Return the settings of ``Llama``.

    Tokens are evaluated one at a time, so that cells are equal to the last bit whether they were
    restored or evaluated again. An app's replies must then be equal, too.
    """
    return {
        "n_ctx": 1024, "n_ubatch": 1, "n_threads": 1,
        "n_threads_batch": 1, "flash_attn": True, "seed": 1, "verbose": False,
    }  # fmt: skip


@pytest.fixture
def opened(engine, reference_model):
    """Return a function that makes a ``Llama`` for a block, as an app does for its client."""
    return lambda **kwargs: contextlib.closing(Llama(str(reference_model), **(engine | kwargs)))


@pytest.fixture
def lives(tmp_path):
    """Return a function that runs an app four times and demands the same result each time.

    The runs are: vanilla, with nothing enabled, with contexts kept, and again with the contexts of
    the third run, as after a restart. The function returns the result, and the numbers of restored
    tokens of both runs with contexts.
    """
    kept = {"codec": "lossless", "ram_budget": "4 MiB", "store": str(tmp_path / "kv")}

    def lives(app):
        expected = app()
        with activate({}):
            assert app() == expected
        restored = []
        for _ in range(2):
            with activate({"on_error": "raise", "plugins": {"kv_chunks": kept}}) as suite:
                assert app() == expected
                found = suite.status()["plugins"]["kv_chunks"]
            assert (found["left_alone"], found["faults"], found["io_errors"]) == ([], 0, 0)
            restored.append(found["restored_tokens"])
        return SimpleNamespace(result=expected, restored=restored)

    return lives
