"""An app run on stock llama.cpp and with us; both have to come out the same."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
from llama_cpp import Llama

from llmaas_plugins import activate


@pytest.fixture
def subjects():
    """What two users begin with; more than a chunk each, so that it is worth keeping."""
    return (
        "My name is Anna and I live in a small house near the station. Tell me about your dog.",
        "My name is Bert and I work for a bank in a large city. I want to fly to Rome.",
    )


@pytest.fixture
def engine():
    """How ``Llama`` is made.

    Tokens are evaluated one at a time, so that cells are the same to the last bit no matter which
    were restored and which evaluated again. Then an app's replies have to be equal, too.
    """
    return {
        "n_ctx": 1024, "n_ubatch": 1, "n_threads": 1,
        "n_threads_batch": 1, "flash_attn": True, "seed": 1, "verbose": False,
    }  # fmt: skip


@pytest.fixture
def opened(engine, reference_model):
    """Make a ``Llama`` for a block, as an app does that hands it to its client."""
    return lambda **kwargs: contextlib.closing(Llama(str(reference_model), **(engine | kwargs)))


@pytest.fixture
def lives(tmp_path):
    """Run an app four times: as ever, with nothing enabled, with its contexts kept, and again.

    It has to come to the same result each time. What that is, and by run with contexts how many
    tokens were restored. The last run finds what the one before left behind, as after a restart.
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
