"""A model of two layers, and each kind of file that is made of it."""

from __future__ import annotations

import pytest
from containers import Channelled, Packed
from flash_models import write_model
from gguf import GGMLQuantizationType as Type

from llmaas_plugins.flash_weights.model_weights import ModelWeights


@pytest.fixture(scope="session", params=[Packed, Channelled], ids=["packed", "channels"])
def how(request):
    return request.param


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model.gguf", Type.Q4_0, n_layers=2)


@pytest.fixture(scope="session")
def expected(how, tmp_path_factory):
    """Return the file that an undisturbed run writes, from a copy of the model."""
    copy = write_model(tmp_path_factory.mktemp("whole") / "model.gguf", Type.Q4_0, n_layers=2)
    list(how.write(copy))
    return how.place(copy).read_bytes()


@pytest.fixture
def reads(monkeypatch):
    """Record the weights that are read from models."""
    names, read = [], ModelWeights.read

    def noted(self, name):
        names.append(name)
        return read(self, name)

    monkeypatch.setattr(ModelWeights, "read", noted)
    return names
