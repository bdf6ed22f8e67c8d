"""Tiny models of every family, and activations for the test's store."""

from __future__ import annotations

import contextlib
import functools

import pytest

from llmaas_eval.families import write_family, write_lora
from llmaas_plugins import activate


@pytest.fixture(scope="session")
def family(tmp_path_factory):
    """Path of a family's model, by name; written once."""
    folder = tmp_path_factory.mktemp("families")
    return functools.cache(lambda name: write_family(name, folder / f"{name}.gguf"))


@pytest.fixture(scope="session")
def lora(tmp_path_factory):
    """Path of an adapter for the llama family."""
    return write_lora("llama", tmp_path_factory.mktemp("lora") / "lora.gguf")


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


@pytest.fixture
def report():
    """What kv_chunks has to say, when all is done."""

    def ask(suite):
        suite.settle()
        return suite.status()["plugins"]["kv_chunks"]

    return ask


@pytest.fixture
def said(caplog):
    """What the suite logged, line by line."""
    return lambda: [r.getMessage() for r in caplog.records if r.name.startswith("llmaas")]
