"""Channel files that are damaged, hostile or of another model are refused."""

from __future__ import annotations

import dataclasses
import shutil
import struct

import numpy as np
import pytest
from containers import channels_of, scales_of
from damages import cuts, flip, flips, overwrite
from flash_models import (
    WIDTH,
    tensors_of,
    write_model,
)
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader

from llmaas_hooks import ConfigError, FileStamp, LlmaasError, ModelLoad, StoreError
from llmaas_plugins._native import crc32c
from llmaas_plugins.flash_weights import container
from llmaas_plugins.flash_weights.channels import (
    channel_path,
    open_channels,
)
from llmaas_plugins.flash_weights.sparse import model_channels
from llmaas_plugins.model.digest import begin_digest, files_now


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Return the folder of a model and its channel file; tests only read them."""
    path, _, _ = channels_of(tmp_path_factory.mktemp("original"), n_layers=1)
    return path.parent


@pytest.fixture
def sound(original, tmp_path):
    """Return a copy of the model, its tensors, and its channel file."""
    path = shutil.copytree(original, tmp_path / "copy") / "model.gguf"
    tensors = tensors_of(path)
    return path, tensors, open_channels(channel_path(path), path, tensors)


def opened(sound):
    path, tensors, file = sound
    return open_channels(file.path, path, tensors)


def test_damage_in_what_is_read_is_found(sound):
    flip(sound[2].path, place_of(sound[2], "order.0.ffn_up"))
    with pytest.raises(StoreError, match=r"its order\.0\.ffn_up differs from what was written"):
        opened(sound)


@pytest.mark.parametrize("name", ["scales.blk.0.attn_k.weight", "mins.blk.0.attn_k.weight"])
def test_damage_in_scales_is_found_when_they_are_read(tmp_path, name):
    _, _, file = channels_of(tmp_path, "Q4_1", n_layers=1)
    flip(file.path, place_of(file, name))
    damaged = file._replace(stamp=FileStamp.at(file.path))
    with pytest.raises(StoreError, match=f"its {name} differs from what was written"):
        scales_of(damaged)


def place_of(file, name):
    return {each.name: int(each.data_offset) for each in GGUFReader(file.path).tensors}[name]


def test_damage_anywhere_in_the_metadata_is_found(sound):
    target = sound[2].path
    end = min(int(tensor.data_offset) for tensor in GGUFReader(target).tensors)
    header = len(target.read_bytes()[:end].rstrip(b"\0"))
    for _ in flips(target, range(0, header, 7)):
        with pytest.raises(StoreError, match="not a channel file, or is damaged"):
            opened(sound)
    opened(sound)


def test_a_file_that_is_cut_off_or_goes_on_is_refused(sound):
    target = sound[2].path
    for _ in cuts(target, [0, 3, 24, 100, 4096, -4096, -1]):
        with pytest.raises(StoreError, match="not a channel file, or is damaged"):
            opened(sound)
    for _ in cuts(target, [target.stat().st_size + 4096]):
        with pytest.raises(StoreError, match="bytes, expected"):
            opened(sound)


def hostile(**changes):
    """Return a valid header with some fields changed and with correct checksums."""

    def write(target):
        header, sums = container.parse_header(target.read_bytes())
        fields = dict(header.fields) | {
            f"llmaas.channels.{name}": value for name, value in changes.items()
        }
        fields = {name: value for name, value in fields.items() if value is not None}
        changed = container.ContainerHeader(header.architecture, fields, header.parts)
        content = changed.with_sums(sums)
        first = min(header.places.values())
        rest = target.read_bytes()[first:]
        target.write_bytes(content.ljust(min(changed.places.values()), b"\0") + rest)

    return write


QUANTILES = [0.1] * 18 * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_layers": 0}, "groups have 0 layers"),
        ({"group_layers": 2**32 - 1}, "groups have 4294967295 layers"),
        ({"group_layers": "1"}, "groups have 1 layers"),
        ({"group_layers": None}, "groups have None layers"),
        ({"layers": (0,)}, "list of operands is missing"),
        ({"layers": (0, 0, 0, 7)}, "operands differ"),
        ({"layers": ("0",) * 4}, "list of operands is missing"),
        ({"layers": (float("inf"),) * 4}, "list of operands is missing"),
        ({"families": ("attn_qkv",) * 4}, "differ"),
        ({"families": ("a", "b", "c", "d")}, "operands differ"),
        ({"bits": (8,) * 7}, "tensors differ"),
        ({"quantiles": (0.1,) * 75}, "quantiles are missing"),
        ({"quantiles": (*QUANTILES, 0.1, 0.1, 0.1, 0.0)}, "not ascending"),
        ({"quantiles": (*QUANTILES, 0.1, 0.1, 0.1, float("nan"))}, "not ascending"),
        ({"quantiles": (*QUANTILES, 0.1, 0.1, 0.1, float("inf"))}, "not ascending"),
        ({"quantiles": (-0.1, *QUANTILES, 0.1, 0.1, 0.1)}, "not ascending"),
        ({"shares": (0.1,) * 75}, "shares are missing"),
        ({"shares": (*QUANTILES, 0.1, 0.1, 0.1, 0.0)}, "shares are not ascending from 0 to 0.95"),
        ({"shares": (*QUANTILES, 0.1, 0.1, 0.1, 0.96)}, "shares are not ascending from 0 to 0.95"),
        ({"shares": (0.2, *QUANTILES, 0.1, 0.1, 0.1)}, "shares are not ascending from 0 to 0.95"),
        ({"magnitudes": (0.1,) * 131}, "magnitudes are missing"),
        ({"magnitudes": (*(0.1,) * 131, 0.2)}, "magnitudes are not descending"),
        ({"magnitudes": (*(0.1,) * 131, -0.1)}, "magnitudes are not descending"),
        ({"magnitudes": (float("nan"), *(0.1,) * 131)}, "magnitudes are not descending"),
        ({"foreseen": (0.1,) * 75}, "foreseen are missing"),
        ({"foreseen": (*QUANTILES, 0.1, 0.1, 0.1, 1.1)}, "foreseen shares are not from 0 to 1"),
        ({"foreseen": (float("nan"), *QUANTILES, 0.1, 0.1, 0.1)}, "foreseen shares are not from"),
        ({"unknown": 1}, "tensors differ"),
    ],
    ids=str,
)
def test_metadata_that_cannot_be_is_refused(sound, changes, message):
    hostile(**changes)(sound[2].path)
    with pytest.raises(StoreError, match=message):
        opened(sound)


def test_tensors_of_other_shapes_are_refused(sound):
    target = sound[2].path
    header, sums = container.parse_header(target.read_bytes())
    parts = list(header.parts)
    i = [part.name for part in parts].index("group.0.attn_qkv")
    parts[i] = dataclasses.replace(parts[i], shape=parts[i].shape[::-1])
    changed = container.ContainerHeader(header.architecture, header.fields, tuple(parts))
    overwrite(target, 0, changed.with_sums(sums))
    with pytest.raises(StoreError, match="tensors differ from the model's"):
        opened(sound)


@pytest.mark.parametrize(
    "order",
    [np.zeros(WIDTH), np.arange(WIDTH) + 1, -np.arange(WIDTH)],
    ids=["same", "far", "below"],
)
def test_an_order_that_is_none_is_refused(sound, order):
    file = sound[2]
    order = order.astype(np.int32)
    header, sums = container.parse_header(file.path.read_bytes())
    sums[0] = crc32c(order.tobytes())
    assert header.parts[0].name == "order.0.attn_qkv"
    overwrite(file.path, 0, header.with_sums(sums))
    overwrite(file.path, header.places["order.0.attn_qkv"], order.tobytes())
    with pytest.raises(StoreError, match=r"the order of 0\.attn_qkv is not a permutation"):
        opened(sound)


@pytest.mark.parametrize("n", [0, 2])
def test_tensors_have_names_of_their_own(n):
    parts = (container.Part("one", int(Type.F16), (64, 64)),)
    content = container.ContainerHeader("some", {"a": 1}, parts).with_sums([5])
    info = content[content.index(struct.pack("<Q", 3) + b"one") :]
    if n == 2:
        header = container.ContainerHeader("some", {"a": 1}, parts * 2)
        content = header.with_sums([5, 5])
    else:
        content = content[:8] + bytes(8) + content[16 : -len(info)]
    with pytest.raises(ValueError, match=r"no tensors|two tensors of the same name"):
        container.parse_header(content)


def test_impossible_sizes_are_refused_before_anything_is_made_of_them(sound):
    target = sound[2].path
    start = b"GGUF" + struct.pack("<I", 3)
    key = struct.pack("<Q", 1) + b"a"
    for content in (
        start + struct.pack("<QQ", 2**64 - 1, 0),
        start + struct.pack("<QQ", 0, 2**64 - 1),
        start + struct.pack("<QQQ", 0, 1, 2**63),
        start + struct.pack("<QQ", 0, 1) + key + struct.pack("<IIQ", 9, 4, 2**62),
        start + struct.pack("<QQ", 0, 1) + key + struct.pack("<IIQ", 9, 8, 2**62),
        start + struct.pack("<QQ", 0, 1) + key + struct.pack("<IIQ", 9, 9, 2**62),
        start + struct.pack("<QQ", 1, 0) + key + struct.pack("<I", 2**32 - 1),
        start + struct.pack("<QQ", 1, 0) + key + struct.pack("<IQQIQ", 2, 2**63, 2**63, 24, 0),
    ):
        target.write_bytes(content.ljust(8192, b"\0"))
        with pytest.raises(StoreError, match="not a channel file, or is damaged"):
            opened(sound)


def test_a_file_of_another_model_is_refused(sound, tmp_path):
    _, tensors, file = sound
    other = write_model(tmp_path / "other.gguf", Type.Q4_0, n_layers=1, seed=1)
    with pytest.raises(ConfigError, match="another model file"):
        open_channels(file.path, other, tensors)


def test_files_that_were_put_in_place_of_a_loaded_models_are_refused(tmp_path):
    """The files fit together, but not with the model that was loaded from there before."""
    path, tensors, _ = channels_of(tmp_path)
    load = ModelLoad(str(path), None, files_now(path))
    begin_digest(load.files).get()
    (tmp_path / "new").mkdir()
    new, *_ = channels_of(tmp_path / "new", seed=1)
    new.replace(path)
    channel_path(new).replace(channel_path(path))
    open_channels(channel_path(path), path, tensors)
    with pytest.raises(LlmaasError, match=r"another model file|replaced or changed after"):
        model_channels(load, tensors)


def test_what_is_no_file_is_refused(sound):
    path, tensors, file = sound
    for place in (file.path.parent, file.path.parent / "none"):
        with pytest.raises(StoreError, match=r"channel file, or is damaged|cannot read"):
            open_channels(place, path, tensors)
