"""Model files that the tests of this folder share; tests that change files copy them."""

from __future__ import annotations

import os
import shutil

import pytest
from gguf import GGMLQuantizationType, GGUFReader
from packed_models import pack

from llmaas_eval.data import packaged_lines
from llmaas_eval.models import Shape, write_random_model
from llmaas_plugins.cli.main import main

LARGE = Shape(n_layer=6, n_embd=512, n_head=8, n_head_kv=4, n_ff=6144, n_ctx=512)
"""A shape with 75 MB of weights in Q8_0."""
SMALL = Shape(n_layer=4, n_embd=256, n_head=4, n_head_kv=2, n_ff=4096, n_ctx=256)
"""A shape with 15 MB of weights in Q8_0."""


@pytest.fixture(scope="session")
def reference_model(packaged_model):
    """Return the packaged model: a light one has too few weights to stream."""
    return packaged_model


def write(path, shape, seed=0):
    return write_random_model(path, shape, GGMLQuantizationType.Q8_0, seed=seed)


@pytest.fixture(scope="session")
def model(shared):
    """Return a model of the large shape; another one lies beside it."""

    def fill(folder):
        path = write(folder / "model.gguf", LARGE)
        other = shutil.copyfile(path, folder / "other.gguf")
        for tensor in GGUFReader(other, "r+").tensors:  # quicker than to draw weights again
            tensor.data[:] = tensor.data[::-1].copy()

    return shared("large", fill) / "model.gguf"


@pytest.fixture(scope="session")
def packed(model, shared):
    """Return the same model with a packed file beside it."""

    def fill(folder):
        os.link(model, folder / "model.gguf")
        assert main(["flash", "pack", str(folder / "model.gguf")]) == 0

    return shared("large packed", fill) / "model.gguf"


@pytest.fixture(scope="session")
def small(shared):
    """Return a model of the small shape."""
    return shared("small", lambda folder: write(folder / "model.gguf", SMALL)) / "model.gguf"


@pytest.fixture(scope="session")
def small_packed(small, shared):
    """Return the small model with a packed file beside it; another packed model lies there too."""

    def fill(folder):
        os.link(small, folder / "model.gguf")
        for path in (folder / "model.gguf", write(folder / "other.gguf", SMALL, seed=7)):
            pack(path)

    return shared("small packed", fill) / "model.gguf"


@pytest.fixture(scope="session")
def sparse(reference_model, shared):
    """Return the reference model with a packed file, a channel file and a calibration text."""

    def fill(folder):
        path = shutil.copyfile(reference_model, folder / "model.gguf")
        text = path.with_suffix(".txt")
        text.write_text("\n".join(line for lines in packaged_lines() for line in lines))
        command = ["flash", "pack", "--sparse", "--equal-shares", "--text", str(text), str(path)]
        assert main(command) == 0

    return shared("sparse", fill) / "model.gguf"
