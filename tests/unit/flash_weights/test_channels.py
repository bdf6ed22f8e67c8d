"""The channel file: its content equals the model's, and other files are refused."""

from __future__ import annotations

import dataclasses
import shutil
import weakref
from unittest.mock import Mock

import numpy as np
import pytest
from containers import channels_of, scales_of
from flash_models import (
    N_FF,
    WIDTH,
    calibration_of,
    matrices,
    tensors_of,
    weights_of,
    write_model,
)
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader, quants

from llmaas_hooks import ConfigError, FileStamp, StoreError
from llmaas_plugins.flash_weights import channel_header
from llmaas_plugins.flash_weights.calibration import Activity
from llmaas_plugins.flash_weights.channel_header import CHANNEL_FILE, contents_of
from llmaas_plugins.flash_weights.channel_layout import channel_operands
from llmaas_plugins.flash_weights.channel_use import channel_uses
from llmaas_plugins.flash_weights.channels import (
    channel_path,
    open_channels,
    open_scales,
    write_channels,
)
from llmaas_plugins.flash_weights.config import FlashWeightsConfig
from llmaas_plugins.flash_weights.container_file import ContainerFile
from llmaas_plugins.flash_weights.shares import SPARSITIES, equal_share
from llmaas_plugins.flash_weights.sparse import add_channels
from llmaas_plugins.model.gguf_header import read_header

KINDS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8, "F16": 8, "BF16": 8, "F32": 8}


def decoded(file, channels, i):
    """Decode an operand's matrix, channel by channel from its records, rows first."""
    piece, content = channels.pieces[i], np.fromfile(file.path, np.uint8)
    chunk, k = np.divmod(np.arange(piece.n_rows), 128)
    scales, mins = scales_of(file)[piece.name]
    zero = 1 << (piece.n_bits - 1) if mins is None else 0
    mins = np.zeros_like(scales) if mins is None else mins
    matrix = np.empty((piece.n_rows, channels.operand.n_channels), np.float32)
    for position, channel in enumerate(channels.order):
        at = channels.first + position * channels.stride + piece.offset
        column = content[at : at + piece.n_bytes]
        if piece.n_bits == 4:
            byte = column[chunk * 64 + k % 64]
            numbers = np.where(k >= 64, byte >> 4, byte & 15)
        else:
            numbers = column[chunk * 128 + k]
        scale, least = (
            each[channel // 32, : piece.n_rows].astype(np.float32) for each in (scales, mins)
        )
        matrix[:, channel] = scale * (numbers.astype(np.float32) - zero) - least
    return matrix


@pytest.mark.parametrize("kind", KINDS)
def test_records_have_the_models_weights(tmp_path, kind):
    path, tensors, file = channels_of(tmp_path, kind, n_layers=1)
    weights = weights_of(path)
    names = [piece.name for channels in file.operands.values() for piece in channels.pieces]
    assert sorted(names) == sorted(name for name in tensors if name.startswith("blk."))
    for channels in file.operands.values():
        for i, piece in enumerate(channels.pieces):
            expected = weights[piece.name]
            if not kind.startswith("Q"):
                eight = quants.quantize(expected, Type.Q8_0)
                expected = quants.dequantize(eight, Type.Q8_0)
            assert piece.n_bits == KINDS[kind]
            np.testing.assert_array_equal(decoded(file, channels, i), expected)


def test_numbers_of_q4_k_are_kept_and_scales_nearly(tmp_path):
    name = "blk.0.attn_output.weight"
    path, tensors, file = channels_of(tmp_path, "Q4_K", names={name: (128, 512)})
    scales, mins = (each.astype(np.float32) for each in scales_of(file)[name])
    largest = np.repeat(15 * scales + mins, 32, axis=0).T
    found = decoded(file, file.operands[0, "attn_output"], 0)
    assert (np.abs(found - weights_of(path)[name]) <= largest * 2**-11).all()
    assert len(np.unique(scales)) > 500
    n_bytes = sum(int(tensor.n_bytes) for tensor in GGUFReader(file.path).tensors)
    assert n_bytes < 1.2 * tensors[name].n_bytes


@pytest.mark.parametrize("group_layers", [1, 2, 3, 64])
@pytest.mark.slow
def test_layers_of_a_group_are_in_one_record(tmp_path, group_layers):
    path, _, file = channels_of(tmp_path, group_layers=group_layers, n_layers=4)
    weights = weights_of(path)
    assert file.group_layers == group_layers
    for (layer, family), channels in file.operands.items():
        assert channels.group == (layer // group_layers, family)
        members = [one for one in file.operands.values() if one.group == channels.group]
        assert channels.stride == sum(one.n_bytes for one in members)
        start = min(one.first for one in members)
        assert start % 4096 == 0
        offset = (layer % group_layers) * channels.n_bytes
        assert channels.first == start + offset
        assert all(one.order is channels.order for one in members)
        for i, piece in enumerate(channels.pieces):
            np.testing.assert_array_equal(decoded(file, channels, i), weights[piece.name])


def test_matrices_of_a_record_are_in_the_order_of_their_family(tmp_path):
    _, _, file = channels_of(tmp_path, n_layers=1)
    (_, up) = (file.operands[0, family] for family in ("attn_qkv", "ffn_up"))
    assert [piece.name for piece in up.pieces] == ["blk.0.ffn_gate.weight", "blk.0.ffn_up.weight"]
    n_bytes = 2 * 64  # 160 rows are two chunks
    assert [(piece.offset, piece.n_bytes) for piece in up.pieces] == [(0, n_bytes), (n_bytes,) * 2]
    scales = scales_of(file)
    for piece in up.pieces:
        assert scales[piece.name].scales.shape == (WIDTH // 32, 256)
        assert not scales[piece.name].scales[:, N_FF:].any()
        assert scales[piece.name].mins is None


def test_what_pads_a_column_is_zero(tmp_path):
    for kind, zero in (("Q4_0", 0x88), ("Q8_0", 0x80)):
        _, _, file = channels_of(tmp_path, kind, n_layers=1)
        down = file.operands[0, "ffn_down"]
        column = file.path.read_bytes()[down.first : down.first + down.n_bytes]
        if kind == "Q4_0":
            assert all(byte >> 4 == zero >> 4 for byte in column)  # 64 rows
        else:
            assert set(column[WIDTH:]) == {zero}


def test_the_order_of_a_group_is_that_of_its_layers_together(tmp_path):
    path = write_model(tmp_path / "model.gguf", Type.Q4_0, n_layers=2)
    tensors, target = tensors_of(path), channel_path(path)
    calibration = calibration_of(tensors)
    means = np.stack([np.arange(WIDTH, 0, -1), np.ones(WIDTH)]).astype(np.float32)
    means[1, 9] = 1000
    for operand in calibration:
        if operand.family == "attn_qkv":
            thresholds = calibration[operand].thresholds
            calibration[operand] = Activity(thresholds, means[operand.layer])
    rest = [channel for channel in range(WIDTH) if channel != 9]
    for group_layers, orders in ((2, [[9, *rest]] * 2), (1, [list(range(WIDTH)), [9, *rest]])):
        list(write_channels(path, target, tensors, calibration, group_layers=group_layers))
        found = open_channels(target, path, tensors).operands
        assert [found[i, "attn_qkv"].order.tolist() for i in range(2)] == orders


def test_thresholds_are_between_those_measured(tmp_path):
    _, tensors, file = channels_of(tmp_path, n_layers=1)
    channels = file.operands[0, "ffn_down"]
    activity = calibration_of(tensors)[channels.operand]
    for found, known in (
        (channels.threshold, activity.thresholds),
        (channels.share, activity.share),
    ):
        assert found(0) == 0
        for sparsity, expected in zip(SPARSITIES, known, strict=True):
            assert found(sparsity) == pytest.approx(expected)
        assert found(0.025) == pytest.approx(known[0] / 2)
        assert found(0.525) == pytest.approx((known[9] + known[10]) / 2)
        for sparsity in (-0.01, 0.96, float("nan")):
            with pytest.raises(ValueError, match="sparsity is"):
                found(sparsity)


def test_a_file_without_shares_has_the_same_for_all(tmp_path):
    path = write_model(tmp_path / "model.gguf", Type.Q4_0, n_layers=1)
    tensors, target = tensors_of(path), channel_path(path)
    calibration = {
        operand: dataclasses.replace(activity, share=equal_share())
        for operand, activity in calibration_of(tensors).items()
    }
    list(write_channels(path, target, tensors, calibration))
    assert "llmaas.channels.shares" not in read_header(target).fields
    for channels in open_channels(target, path, tensors).operands.values():
        assert [channels.share(each) for each in SPARSITIES] == pytest.approx(SPARSITIES)


def test_how_channels_are_used_is_kept(tmp_path):
    path = write_model(tmp_path / "model.gguf", Type.Q4_0, n_layers=2)
    tensors, target, rng = tensors_of(path), channel_path(path), np.random.default_rng(0)
    calibration = {
        operand: dataclasses.replace(activity, foreseen=rng.random(19, np.float32))
        for operand, activity in calibration_of(tensors).items()
    }
    list(write_channels(path, target, tensors, calibration))
    header = read_header(target)
    with ContainerFile(target, CHANNEL_FILE) as file:
        contents = contents_of(file.header, tensors)
    for operand, activity in calibration.items():
        key = (operand.layer, operand.family)
        np.testing.assert_array_equal(contents.foreseen[key], activity.foreseen)
        ordered = np.sort(activity.means)[::-1] / activity.means.mean()
        magnitudes = contents.magnitudes[key]
        assert magnitudes[16] == pytest.approx(np.median(ordered), rel=1e-3)
        assert ordered[0] >= magnitudes[0] > magnitudes[-1] >= ordered[-1]
    used = channel_uses(contents)["ffn_up"]
    rows = [one.foreseen for operand, one in calibration.items() if operand.family == "ffn_up"]
    np.testing.assert_allclose(used.foreseen, np.mean(rows, axis=0), rtol=1e-6)
    assert "llmaas.channels.foreseen" in header.fields
    assert open_channels(target, path, tensors).group_layers == 1


def test_files_of_earlier_versions_do_not_say_how_channels_are_used(tmp_path, monkeypatch):
    path = write_model(tmp_path / "model.gguf", Type.Q4_0, n_layers=1)
    tensors, target = tensors_of(path), channel_path(path)
    make = channel_header._header
    monkeypatch.setattr(
        channel_header,
        "_header",
        lambda model, contents, activity: make(
            model, contents._replace(magnitudes=None, foreseen=None), activity
        ),
    )
    list(write_channels(path, target, tensors, calibration_of(tensors)))
    monkeypatch.undo()
    assert not {"llmaas.channels.magnitudes", "llmaas.channels.foreseen"} & set(
        read_header(target).fields
    )
    assert open_channels(target, path, tensors).operands
    with ContainerFile(target, CHANNEL_FILE) as file:
        used = channel_uses(contents_of(file.header, tensors))
    assert all((one.magnitudes, one.foreseen) == (None, None) for one in used.values())


def test_other_programs_can_read_it(tmp_path):
    _, _, file = channels_of(tmp_path, "Q8_0", n_layers=2, group_layers=2)
    reader = GGUFReader(file.path)
    assert reader.fields["general.architecture"].contents() == "llmaas-channels"
    found = {tensor.name: tensor for tensor in reader.tensors}
    channels = file.operands[1, "ffn_down"]
    np.testing.assert_array_equal(found["order.0.ffn_down"].data, channels.order)
    assert found["group.0.ffn_down"].data.shape == (N_FF, channels.stride)
    assert found["group.0.ffn_down"].data_offset == channels.first - channels.n_bytes
    name = "blk.1.ffn_down.weight"
    np.testing.assert_array_equal(found[f"scales.{name}"].data, scales_of(file)[name].scales)
    assert file.path.stat().st_size % 4096 == 0


def test_scales_are_in_memory_for_one_operand_at_a_time(tmp_path):
    class Copying:
        handed_over = ()

        def add_operand(self, path, stamp, operand):
            assert (path, stamp) == (str(file.path), FileStamp.at(file.path))
            assert not any(array() is not None for array in self.handed_over)
            arrays = [each for one in operand.columns for each in (one.scales, one.mins)]
            self.handed_over = [weakref.ref(array) for array in arrays]
            expected = [each for one in operand.columns for each in scales[one.weight]]
            assert all(map(np.array_equal, arrays, expected))

    _, _, file = channels_of(tmp_path, "Q4_1", n_layers=2)
    scales, weights = scales_of(file), Copying()
    add_channels(weights, file, FlashWeightsConfig(mode="sparse"))
    assert len(weights.handed_over) == 2


def test_each_operand_leaves_out_its_own_share(tmp_path):
    _, _, file = channels_of(tmp_path, n_layers=2)
    weights = Mock()
    for selection in ("top_k", "threshold"):
        config = FlashWeightsConfig(mode="sparse", selection=selection, sparsity=0.6)
        add_channels(weights, file, config)
    made = [call.args[2] for call in weights.add_operand.call_args_list]
    known = list(file.operands.values())
    kept = [round(len(one.order) * (1 - one.share(0.6))) for one in known]
    assert [one.n_top for one in made] == kept + [0] * len(known)
    assert len(set(kept)) > 1
    thresholds = [one.threshold(0.6) for one in known]
    assert [one.threshold for one in made] == [0.0] * len(known) + thresholds


def test_a_file_that_replaces_a_checked_one_is_refused(tmp_path):
    path, tensors, file = channels_of(tmp_path, n_layers=1)
    with open_scales(file):
        pass
    shutil.copy(file.path, tmp_path / "other")
    (tmp_path / "other").replace(file.path)
    with pytest.raises(StoreError, match="was replaced or changed while it was opened"):
        add_channels(None, file, FlashWeightsConfig(mode="sparse"))
    with open_scales(open_channels(file.path, path, tensors)):
        pass


# -- models that have only some of it ------------------------------------------------------------


def test_only_what_can_be_read_by_channels_is_in_it(tmp_path):
    names = matrices(2)
    del names["blk.0.ffn_up.weight"]
    path = write_model(tmp_path / "model.gguf", Type.Q4_0, names=names)
    tensors = tensors_of(path)
    calibration = calibration_of(tensors)
    (left_out,) = (one for one in calibration if (one.layer, one.family) == (1, "ffn_down"))
    del calibration[left_out]
    list(write_channels(path, channel_path(path), tensors, calibration, group_layers=2))
    found = open_channels(channel_path(path), path, tensors).operands
    assert sorted(found) == [
        (0, "attn_output"),
        (0, "attn_qkv"),
        (0, "ffn_down"),
        (1, "attn_output"),
        (1, "attn_qkv"),
        (1, "ffn_up"),
    ]


def test_channels_come_in_whole_blocks(tmp_path):
    tensors = tensors_of(write_model(tmp_path / "model.gguf", Type.F16, n_layers=1))
    name = "blk.0.ffn_down.weight"
    tensors[name] = dataclasses.replace(tensors[name], shape=(N_FF - 16, WIDTH, 1))
    found = [operand.family for operand in channel_operands(tensors)]
    assert found == ["attn_qkv", "attn_output", "ffn_up"]


def test_layers_of_other_widths_do_not_share_records(tmp_path):
    names = matrices(2) | {"blk.1.ffn_down.weight": (WIDTH, 96)}
    path = write_model(tmp_path / "model.gguf", Type.Q4_0, names=names)
    tensors = tensors_of(path)
    target = channel_path(path)
    list(write_channels(path, target, tensors, calibration_of(tensors), group_layers=2))
    assert (1, "ffn_down") not in open_channels(target, path, tensors).operands
    list(write_channels(path, target, tensors, calibration_of(tensors)))
    assert open_channels(target, path, tensors).operands[1, "ffn_down"].operand.n_channels == 96


def test_a_model_without_such_matrices_is_refused(tmp_path):
    path = write_model(tmp_path / "model.gguf", Type.Q4_0, names={"blk.0.qkv.weight": (64, 64)})
    target = channel_path(path)
    with pytest.raises(ConfigError, match="no matrices whose channels"):
        list(write_channels(path, target, tensors_of(path), {}))
    assert not target.exists()


def test_a_type_that_cannot_be_decoded_stays_out(tmp_path):
    tensors = tensors_of(write_model(tmp_path / "model.gguf", Type.Q4_0, n_layers=1))
    name = "blk.0.ffn_down.weight"
    tensors[name] = dataclasses.replace(tensors[name], type=int(Type.Q8_K))
    found = [operand.family for operand in channel_operands(tensors)]
    assert found == ["attn_qkv", "attn_output", "ffn_up"]


@pytest.mark.parametrize(
    ("activity", "message"),
    [
        (Activity(np.full(19, np.nan, np.float32), np.ones(WIDTH)), "not ascending"),
        (Activity(np.ones(18, np.float32), np.ones(WIDTH)), "not ascending"),
        (Activity(np.ones(19, np.float32), np.ones(WIDTH - 1)), "other channels"),
        (Activity(np.ones(19, np.float32), np.ones(WIDTH), np.ones(19, np.float32)), "shares"),
    ],
    ids=["nan", "short", "narrow", "all"],
)
def test_a_calibration_of_something_else_is_refused(tmp_path, activity, message):
    path = write_model(tmp_path / "model.gguf", Type.Q4_0, n_layers=1)
    tensors = tensors_of(path)
    calibration = calibration_of(tensors)
    calibration[next(iter(calibration))] = activity
    with pytest.raises(ValueError, match=message):
        list(write_channels(path, channel_path(path), tensors, calibration))
    assert not list(tmp_path.glob("*.channels*"))


@pytest.mark.parametrize("group_layers", [0, 65])
def test_groups_have_sizes(tmp_path, group_layers):
    path = write_model(tmp_path / "model.gguf", Type.Q4_0, n_layers=1)
    with pytest.raises(ConfigError, match=f"groups have {group_layers} layers"):
        list(write_channels(path, channel_path(path), {}, {}, group_layers=group_layers))
