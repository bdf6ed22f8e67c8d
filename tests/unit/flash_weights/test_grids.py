"""Matrices as the channel file stores them: read, written again, and distilled files."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from containers import channels_of
from flash_models import calibration_of, weights_of
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader, quants

from llmaas_hooks import ConfigError, StoreError
from llmaas_plugins.cli.main import main
from llmaas_plugins.flash_weights.channel_header import Distilled
from llmaas_plugins.flash_weights.channels import (
    Distillation,
    channel_path,
    open_channels,
    write_channels,
)
from llmaas_plugins.flash_weights.grids import Grid, grid_of, matrices_in, stored

KINDS = ("Q4_0", "Q4_1", "Q4_K", "Q8_0", "F16")
ABOUT = Distilled("0" * 32, 4096, (0.4, 0.8))


def model_of(tmp_path, kind, group_layers=1):
    if kind != "Q4_K":
        return channels_of(tmp_path, kind, group_layers)
    names = {f"blk.{i}.attn_output.weight": (160, 512) for i in range(2)}
    return channels_of(tmp_path, kind, group_layers, names=names)


def grids(path, tensors):
    """Return the grid of each matrix of the layers."""
    read = {tensor.name: tensor.data for tensor in GGUFReader(path).tensors}
    return {
        name: grid_of(info, np.ascontiguousarray(read[name]).view(np.uint8).reshape(-1))
        for name, info in tensors.items()
        if name.startswith("blk.")
    }


def other(grid, rng):
    """Return a grid with other numbers and factors."""
    scales = rng.uniform(-1, 1, grid.scales.shape).astype(np.float16)
    mins = None if grid.mins is None else rng.uniform(0, 1, scales.shape).astype(np.float16)
    numbers = rng.integers(grid.least, grid.most, grid.numbers.shape, np.int8, endpoint=True)
    return Grid(numbers, scales, mins, grid.least, grid.most)


def distilled(path, tensors, seed=0, target=None, **options):
    """Write a channel file with random matrices of the same grids; return them."""
    rng = np.random.default_rng(seed)
    found = {name: other(grid, rng) for name, grid in grids(path, tensors).items()}
    about = ABOUT._replace(digest=hashlib.md5(bytes([seed]), usedforsecurity=False).hexdigest())
    new = Distillation(about, lambda name: stored(tensors[name], found[name]))
    target = target or channel_path(path)
    list(
        write_channels(path, target, tensors, calibration_of(tensors), distillation=new, **options)
    )
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_grid_has_the_values_of_the_file(tmp_path, kind):
    path, tensors, file = model_of(tmp_path, kind)
    weights, in_file = weights_of(path), dict(matrices_in(file))
    found = grids(path, tensors)
    assert in_file.keys() == found.keys()
    for name, grid in found.items():
        assert np.array_equal(grid.values, in_file[name])
        expected = weights[name]
        if kind == "F16":
            expected = quants.dequantize(quants.quantize(expected, Type.Q8_0), Type.Q8_0)
        atol = 2**-7 if kind == "Q4_K" else 0  # the products of its scales are rounded
        np.testing.assert_allclose(grid.values, expected, atol=atol, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group_layers", [1, 2])
def test_a_distilled_file_has_its_own_matrices(tmp_path, kind, group_layers):
    path, tensors, before = model_of(tmp_path, kind, group_layers)
    found = distilled(path, tensors, group_layers=group_layers)
    file = open_channels(channel_path(path), path, tensors)
    assert before.distilled is None
    assert file.distilled.n_tokens == 4096
    assert file.distilled.sparsities == pytest.approx((0.4, 0.8))
    assert file.operands.keys() == before.operands.keys()
    in_file = dict(matrices_in(file))
    assert in_file.keys() == found.keys()
    for name, values in in_file.items():
        assert np.array_equal(values, found[name].values)


def test_a_file_of_other_matrices_is_not_continued(tmp_path):
    path, tensors, _ = model_of(tmp_path, "Q8_0")
    expected = distilled(path, tensors, seed=1)
    half = tmp_path / "half.channels"
    half.with_name("half.channels.partial").write_bytes(channel_path(path).read_bytes())
    found = distilled(path, tensors, seed=2, target=half)
    in_file = dict(matrices_in(open_channels(half, path, tensors)))
    for name, grid in found.items():
        assert np.array_equal(in_file[name], grid.values)
        assert not np.array_equal(grid.values, expected[name].values)


def test_a_distilled_file_of_another_model_is_refused(tmp_path):
    path, tensors, _ = model_of(tmp_path, "Q8_0")
    distilled(path, tensors)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="it was made from another model file"):
        open_channels(channel_path(path), path, tensors)


def test_a_replaced_file_is_not_read(tmp_path):
    path, tensors, file = model_of(tmp_path, "Q8_0")
    distilled(path, tensors)
    with pytest.raises(StoreError, match="was replaced or changed while it was opened"):
        list(matrices_in(file))


def test_check_says_that_a_file_is_distilled(tmp_path, capfd):
    path, tensors, _ = model_of(tmp_path, "Q8_0")
    assert main(["flash", "check", str(path)]) == 0
    assert "distilled" not in capfd.readouterr().out
    distilled(path, tensors)
    assert main(["flash", "check", str(path)]) == 0
    found = capfd.readouterr().out
    assert ", distilled on 4,096 tokens at 40 to 80 % sparsity: sound" in found
