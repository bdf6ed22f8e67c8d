"""Tiny models of every family in every weight type, an engine on one of them, and channel files."""

from __future__ import annotations

import fcntl
import functools
import os

import pytest
from batches import CONTEXT
from channel_claims import calibrated
from claiming import Claimer, created, loaded, native
from families import write_family
from gguf import GGMLQuantizationType, GGUFReader

from llmaas_eval.families import FAMILIES, Family, write_lora
from llmaas_patches.native.packing import model_tensors
from llmaas_plugins.flash_weights.channels import open_channels, write_channels
from llmaas_plugins.model.quantize import quantize


@pytest.fixture(scope="session")
def families(tmp_path_factory):
    """Return the folder of the models, shared by all xdist workers."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "families"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def family(families):
    """Return a function from a family's name and matrix type to its model's path."""

    def write(name, weights):
        path = families / f"{name}-{weights}.gguf"
        if path.exists():
            return path
        if weights in ("F32", "F16"):
            return write_family(name, path, weights=GGMLQuantizationType[weights])
        return quantize(write(name, "F16"), path, weights)

    @functools.cache
    def find(name, weights="Q8_0"):
        with (families / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return write(name, weights)

    return find


@pytest.fixture(scope="session")
def lora(tmp_path_factory):
    """Return the path of an adapter for the llama family."""
    return write_lora("llama", tmp_path_factory.mktemp("lora") / "lora.gguf")


@pytest.fixture
def native_context(family):
    """Yield a context on the llama family, and the engine that plugins see."""
    plugin = Claimer()
    with (
        native(plugin=plugin),
        loaded(family("llama")) as model,
        created(model, **CONTEXT) as ctx,
    ):
        yield ctx, plugin.contexts[0]


@pytest.fixture(scope="session")
def channels(reference_model, tmp_path_factory):
    """Return the reference model's channel file, by layers in a group; each is written once."""
    folder = tmp_path_factory.mktemp("channels")

    def find(group_layers):
        path, tensors = folder / f"{group_layers}.channels", model_tensors(reference_model)
        if not path.exists():
            calibration = calibrated(tensors)
            list(
                write_channels(
                    reference_model, path, tensors, calibration, group_layers=group_layers
                )
            )
        return open_channels(path, reference_model, tensors)

    return find


class Biased(Family):
    """Family with biases after the blocks' outputs, drawn after all other tensors."""

    def tensors(self):
        names = [f"blk.{i}.{name}.bias" for i in (0, 1) for name in ("attn_output", "ffn_down")]
        return {**super().tensors(), **dict.fromkeys(names, (256,))}


@pytest.fixture
def biased(monkeypatch, tmp_path):
    """Return the llama family's file with biases in it, and the biases by their weights' names."""
    monkeypatch.setitem(FAMILIES, "biased", Biased("llama", FAMILIES["llama"].layers))
    path = write_family("biased", tmp_path / "biased.gguf", weights=GGMLQuantizationType.F16)
    vectors = {tensor.name: tensor.data.copy() for tensor in GGUFReader(path).tensors}
    biases = {name: data for name, data in vectors.items() if name.endswith(".bias")}
    return path, {name.replace("bias", "weight"): data for name, data in biases.items()}
