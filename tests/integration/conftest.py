"""Engines and activations that several of these files use."""

from __future__ import annotations

import contextlib
import functools

import pytest

from llmaas_plugins import activate


@pytest.fixture
def make(make_llama):
    """Make a ``Llama`` that leaves the other processors alone."""
    return functools.partial(make_llama, n_threads_batch=1)


@pytest.fixture
def suite(tmp_path):
    """Activate for the test's store; activating again is another life of the process."""
    with contextlib.ExitStack() as stack:

        def start(**table):
            stack.close()
            table = {"codec": "lossless", "store": str(tmp_path / "kv")} | table
            config = {"on_error": "raise", "plugins": {"kv_chunks": table}}
            return stack.enter_context(activate(config))

        yield start
