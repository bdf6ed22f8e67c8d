"""Packed files and channel files: what is in them, and what is refused."""

from __future__ import annotations

import os
import stat
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from containers import Packed, partial_of, stopped
from damages import FOREIGN, ODD, each_told, flip
from flash_models import tensors_of, write_model
from gguf import GGMLQuantizationType as Type

from llmaas_hooks import StoreError
from llmaas_plugins.flash_weights import container_writer
from llmaas_plugins.flash_weights.channels import (
    channel_path,
    open_channels,
)
from llmaas_plugins.flash_weights.container import ContainerHeader, Part, parse_header
from llmaas_plugins.flash_weights.container_file import ContainerFile
from llmaas_plugins.flash_weights.model_weights import ModelWeights
from llmaas_plugins.flash_weights.packed import (
    PACKED_FILE,
    packed_path,
    packed_problem,
    streamable,
    write_packed,
)


def test_others_may_read_what_was_packed(model, how):
    list(how.write(model))
    assert stat.S_IMODE(how.place(model).stat().st_mode) & 0o444 == 0o444 & ~umask()


def umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_bytes_that_do_not_fit_their_place_are_refused(model):
    tensors = tensors_of(model)
    with pytest.raises(ValueError, match="has 0 bytes, not"):
        list(write_packed(model, packed_path(model), tensors, lambda *_: np.empty(0, np.uint8)))


@pytest.mark.parametrize("kind", ["I", "f"])
@pytest.mark.parametrize("value", [0, 1, float("inf"), float("nan"), 1e38])
@pytest.mark.parametrize("n", [0, 1, 2])
def test_checksums_are_as_many_whole_numbers_as_there_are_tensors(kind, value, n):
    """A made-up file must raise ValueError and nothing else."""
    header = ContainerHeader("x", {"a": 1}, (Part("a", 0, (2, 32)),))
    content, at = header.with_sums([1]), header.sums_at
    code = {"I": 4, "f": 6}[kind]
    number = struct.pack(f"<{kind}", value if kind == "f" else 7)
    made_up = content[: at - 12] + struct.pack("<IQ", code, n) + number * n + content[at + 4 :]
    with pytest.raises(ValueError, match=r"checksums|array|written|names"):
        parse_header(made_up)


def test_headers_have_a_most_size(tmp_path, monkeypatch):
    monkeypatch.setattr(container_writer, "MOST_HEADER_BYTES", 500)
    header = ContainerHeader("x", {}, tuple(Part(f"{i}", 24, (32,)) for i in range(20)))
    with pytest.raises(StoreError, match="20 tensors are too many"):
        list(container_writer.write_container(tmp_path / "x", header, []))


def test_a_tensor_that_no_step_writes_is_noticed(tmp_path):
    header = ContainerHeader("x", {}, (Part("a", 24, (32,)), Part("b", 24, (32,))))
    steps = [container_writer.Step(("a",), lambda: [np.zeros(32, np.int8)], 32)]
    with pytest.raises(ValueError, match="no step has written b"):
        list(container_writer.write_container(tmp_path / "x", header, steps))
    assert not (tmp_path / "x").exists()


def test_reading_back_has_as_much_progress_as_writing(model, how):
    done = []
    for n_bytes in how.write(model):
        assert not how.place(model).exists()
        done.append(n_bytes)
    half = len(done) // 2
    assert done[:half] == done[half:]
    assert min(done) > 0
    assert how.place(model).exists()


# -- what is in it -------------------------------------------------------------------------------


def test_a_packed_file_has_what_repacking_makes_of_each_matrix(model):
    list(Packed.write(model))
    assert packed_problem(packed_path(model), model, tensors_of(model)) is None
    names = streamable(tensors_of(model))
    with ContainerFile(packed_path(model), PACKED_FILE) as file, ModelWeights(model) as weights:
        assert [part.name for part in file.header.parts] == list(names)
        for name in names:
            np.testing.assert_array_equal(file.read(name), ~weights.read(name))
            assert file.header.places[name] % 4096 == 0


def test_what_a_packed_file_is_not_for_is_said(model):
    list(Packed.write(model))
    tensors, name = tensors_of(model), "blk.0.ffn_up.weight"
    others = {
        "tensors differ": {each: info for each, info in tensors.items() if each != name},
        "another kind of processor": tensors | {name: replace(tensors[name], layout=7)},
    }
    for reason, changed in others.items():
        assert reason in packed_problem(packed_path(model), model, changed)
    write_model(model, Type.Q4_0, n_layers=2, seed=5)
    assert "another model file" in packed_problem(packed_path(model), model, tensors)


def test_each_damaged_tensor_is_found(model, how):
    list(how.write(model))
    with ContainerFile(how.place(model), how.kind) as file:
        assert all(is_whole for _, _, is_whole in file.check())
        places = file.header.places
        damaged = list(places)[3], list(places)[-1]
        for name in damaged:
            flip(how.place(model), places[name] + 9)
        found = list(file.check())
    assert tuple(name for name, _, is_whole in found if not is_whole) == damaged
    assert [n_bytes for _, n_bytes, _ in found] == [part.n_bytes for part in file.header.parts]


def test_a_file_that_is_still_being_written_is_no_whole_one(model, how):
    stopped(how.write(model), 3)
    partial_of(how.place(model)).rename(how.place(model))
    with pytest.raises(StoreError, match=f"not a {how.kind.name}, or is damaged"):
        ContainerFile(how.place(model), how.kind)


def test_one_kind_of_file_is_not_taken_for_the_other(model):
    list(Packed.write(model))
    packed_path(model).rename(channel_path(model))
    with pytest.raises(StoreError, match="its architecture is 'llmaas-packed'"):
        open_channels(channel_path(model), model, tensors_of(model))


@each_told(
    {
        "is not a .*, or is damaged": FOREIGN,
        "cannot read|is damaged": {**ODD, "missing": Path.unlink},
    }
)
def test_files_of_another_kind_are_refused(model, how, damage, message):
    list(how.write(model))
    damage(how.place(model))
    with pytest.raises(StoreError, match=message):
        ContainerFile(how.place(model), how.kind)


def test_another_format_is_said_so(model, how, monkeypatch):
    list(how.write(model))
    newer = how.kind._replace(version=9)
    with pytest.raises(StoreError, match=f"format {how.kind.version}, expected 9"):
        ContainerFile(how.place(model), newer)
