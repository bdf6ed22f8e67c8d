"""Tiny models of every family."""

from __future__ import annotations

import functools

import pytest
from families import write_family

from llmaas_eval.families import write_lora


@pytest.fixture(scope="session")
def family(tmp_path_factory):
    """Return a function from a family's name to its model's path; each is written once."""
    folder = tmp_path_factory.mktemp("families")
    return functools.cache(lambda name: write_family(name, folder / f"{name}.gguf"))


@pytest.fixture(scope="session")
def lora(tmp_path_factory):
    """Return the path of an adapter for the llama family."""
    return write_lora("llama", tmp_path_factory.mktemp("lora") / "lora.gguf")


@pytest.fixture
def report():
    """Return a function that reads kv_chunks' status after all work has ended."""

    def ask(suite):
        suite.settle()
        return suite.status()["plugins"]["kv_chunks"]

    return ask


@pytest.fixture
def said(caplog):
    """Return the suite's log lines."""
    return lambda: [r.getMessage() for r in caplog.records if r.name.startswith("llmaas")]
