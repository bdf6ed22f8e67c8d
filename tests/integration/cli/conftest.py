"""Commands, and models to give to them."""

from __future__ import annotations

import pytest
from families import write_family
from gguf import GGMLQuantizationType as Type

from llmaas_plugins.cli.main import main


@pytest.fixture(scope="session")
def reference_model(packaged_model):
    """Return the packaged model: commands prepare files of every one of its layers."""
    return packaged_model


@pytest.fixture
def elastic(capfd):
    """Return a function that runs the command and returns its exit code and output or error."""

    def run(*args):
        capfd.readouterr()
        code = main(["elastic", *map(str, args)])
        printed = capfd.readouterr()
        return code, printed.out if code == 0 else printed.err

    return run


@pytest.fixture(scope="session")
def original(tmp_path_factory):
    """Return an unquantized model with scores."""
    path = write_family("qwen2", tmp_path_factory.mktemp("f16") / "model.gguf", weights=Type.F16)
    assert main(["elastic", "score", str(path), "--tokens", "64"]) == 0
    return path
