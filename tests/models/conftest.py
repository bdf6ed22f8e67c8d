"""Tiny models of every family."""

from __future__ import annotations

import functools

import pytest

from llmaas_eval.families import write_family, write_lora


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
