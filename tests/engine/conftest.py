"""Tiny models of every family, in every type of weights."""

from __future__ import annotations

import functools

import pytest
from gguf import GGMLQuantizationType

from llmaas_eval.families import write_family, write_lora
from llmaas_eval.quantise import quantise


@pytest.fixture(scope="session")
def family(tmp_path_factory):
    """Path of a family's model, by name and type of its matrices; written once."""
    folder = tmp_path_factory.mktemp("families")

    @functools.cache
    def original(name):
        path = folder / f"{name}.gguf"
        return write_family(name, path, weights=GGMLQuantizationType.F16)

    @functools.cache
    def find(name, weights="Q8_0"):
        return quantise(original(name), folder / f"{name}-{weights}.gguf", weights)

    return find


@pytest.fixture(scope="session")
def lora(tmp_path_factory):
    """Path of an adapter for the llama family."""
    return write_lora("llama", tmp_path_factory.mktemp("lora") / "lora.gguf")
