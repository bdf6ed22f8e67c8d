"""Packing can stop at any time for any reason and continue; existing files are checked."""

from __future__ import annotations

import errno
import os
import signal
import stat
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import flash_models
import numpy as np
import pytest
from flash_models import calibration_of, tensors_of, write_model
from gguf import GGMLQuantizationType as Type

from llmaas_hooks import ConfigError, StoreError
from llmaas_plugins.files import partial_file
from llmaas_plugins.flash_weights import container_writer, model_weights
from llmaas_plugins.flash_weights.channels import (
    CHANNEL_FILE,
    channel_path,
    open_channels,
    write_channels,
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


class Packed:
    """How to write and check a packed file."""

    kind, place = PACKED_FILE, staticmethod(packed_path)

    @staticmethod
    def write(model):
        return write_packed(model, packed_path(model), tensors_of(model), lambda _, plain: ~plain)


class Channelled:
    """How to write and check a channel file."""

    kind, place = CHANNEL_FILE, staticmethod(channel_path)

    @staticmethod
    def write(model, seed=0, **options):
        tensors = tensors_of(model)
        calibration = calibration_of(tensors, seed)
        return write_channels(model, channel_path(model), tensors, calibration, **options)


@pytest.fixture(params=[Packed, Channelled], ids=["packed", "channels"])
def how(request):
    return request.param


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model.gguf", Type.Q4_0, n_layers=2)


@pytest.fixture
def expected(model, how, tmp_path):
    """Return the file that an undisturbed run writes, from a copy of the model."""
    (tmp_path / "whole").mkdir()
    copy = tmp_path / "whole" / "model.gguf"
    copy.write_bytes(model.read_bytes())
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


def partial_of(path):
    return path.with_name(f"{path.name}.partial")


def stopped(writing, n):
    """Stop the writing after ``n`` tensors or groups of them."""
    for _ in range(n):
        next(writing)
    writing.close()


def test_stopped_after_each_tensor_it_goes_on_there(model, how, expected, reads):
    target = how.place(model)
    n_steps = len(list(how.write(model)))
    n_reads = len(reads)
    target.unlink()
    for n in range(1, n_steps + 1):
        stopped(how.write(model), n)
        assert not target.exists()
        assert partial_of(target).exists()
    assert len(reads) == 2 * n_reads  # each once by all runs together
    assert len(list(how.write(model))) == n_steps
    assert len(reads) == 2 * n_reads
    assert target.read_bytes() == expected
    assert not partial_of(target).exists()


def full_disk(monkeypatch, n):
    """Simulate a disk that fills during the ``n``-th write, which is cut short."""
    n_left, pwrite = [n], os.pwrite

    def refuse(fd, data, at):
        n_left[0] -= 1
        if n_left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, data if n_left[0] else data[: len(data) // 2 + 1], at)

    monkeypatch.setattr(os, "pwrite", refuse)


@pytest.mark.parametrize("n", [0, 1, 2, 5, 12, 25])
def test_on_a_full_disk_it_stops_and_goes_on_later(model, how, expected, monkeypatch, n):
    target = how.place(model)
    target.write_bytes(b"the one before")
    with monkeypatch.context() as patched:
        full_disk(patched, n)
        with pytest.raises(StoreError, match="No space left on device") as error:
            list(how.write(model))
    assert f"{partial_of(target)} stays" in str(error.value)
    assert target.read_bytes() == b"the one before"
    list(how.write(model))
    assert target.read_bytes() == expected
    assert sorted(path.name for path in model.parent.iterdir() if path.is_file()) == sorted(
        [model.name, target.name]
    )


def test_writes_may_be_short(model, how, expected, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:1000], at))
    list(how.write(model))
    assert how.place(model).read_bytes() == expected


def test_what_was_damaged_meanwhile_is_written_again(model, how, expected, reads):
    target = how.place(model)
    n_all = len(list(how.write(model)))
    target.rename(partial_of(target))
    reads.clear()
    name = "blk.1.attn_output.weight" if how is Packed else "group.1.attn_output"
    with ContainerFile(partial_of(target), how.kind) as file:
        place = file.header.places[name]
    with partial_of(target).open("r+b") as file:
        file.seek(place)
        file.write(b"\x12\x34\x56")
    assert len(list(how.write(model))) == n_all
    assert reads == ["blk.1.attn_output.weight"]
    assert target.read_bytes() == expected


def test_what_was_cut_off_is_written_again(model, how, expected):
    target = how.place(model)
    stopped(how.write(model), 4)
    os.truncate(partial_of(target), partial_of(target).stat().st_size - 100)
    list(how.write(model))
    assert target.read_bytes() == expected


@pytest.mark.parametrize("how", [Channelled], indirect=True)
@pytest.mark.parametrize("options", [{"seed": 1}, {"group_layers": 2}], ids=str)
def test_with_other_settings_it_starts_anew(model, how, expected, reads, options):
    stopped(how.write(model, **options), 3)
    reads.clear()
    list(how.write(model))
    assert len(reads) == 14
    assert how.place(model).read_bytes() == expected


@pytest.mark.parametrize("content", [b"", b"GGUF", bytes(10_000), b"\xff" * 200_000])
def test_what_somebody_else_left_there_is_not_built_upon(model, how, expected, content):
    target = how.place(model)
    partial_of(target).write_bytes(content)
    list(how.write(model))
    assert target.read_bytes() == expected


def test_what_is_left_of_another_model_is_not_built_upon(model, how, expected, tmp_path):
    target = how.place(model)
    content = model.read_bytes()
    write_model(model, Type.Q4_0, n_layers=2, seed=5)
    stopped(how.write(model), 3)
    model.write_bytes(content)
    list(how.write(model))
    assert target.read_bytes() == expected


def test_what_is_no_file_is_left_alone(model, how, tmp_path):
    partial, precious = partial_of(how.place(model)), tmp_path / "precious"
    precious.write_bytes(b"precious")
    for make in (
        lambda: partial.symlink_to(precious),
        partial.mkdir,
        lambda: os.mkfifo(partial),
    ):
        make()
        with pytest.raises(StoreError):
            list(how.write(model))
        assert precious.read_bytes() == b"precious"
        assert not how.place(model).exists()
        partial.rmdir() if partial.is_dir() else partial.unlink()


def test_only_one_at_a_time_writes_it(model, how, expected):
    first = how.write(model)
    next(first)
    with pytest.raises(StoreError, match="is being written by another process"):
        next(how.write(model))
    list(first)
    assert how.place(model).read_bytes() == expected


KILLED = """
import os, signal, sys
sys.path[:0] = sys.argv[3:]
import test_packing as tests
from pathlib import Path
for i, _ in enumerate(getattr(tests, sys.argv[1]).write(Path(sys.argv[2]))):
    if i == 3:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_wrote_is_kept(model, how, expected, reads):
    folders = [str(Path(__file__).parent), str(Path(flash_models.__file__).parent)]
    command = [sys.executable, "-c", KILLED, how.__name__, str(model), *folders]
    assert subprocess.run(command, check=False, timeout=60).returncode == -signal.SIGKILL
    list(how.write(model))
    assert 0 < len(reads) < 14
    assert how.place(model).read_bytes() == expected


def test_a_file_that_was_finished_while_it_was_opened_is_not_written_to(
    model, how, expected, monkeypatch
):
    target, try_lock = how.place(model), partial_file.try_lock
    finished = []

    def once(fd):
        if not finished:  # the other process's last action
            partial_of(target).write_bytes(b"all of it")
            finished.append(partial_of(target).rename(target.with_name("other")))
        return try_lock(fd)

    monkeypatch.setattr(partial_file, "try_lock", once)
    list(how.write(model))
    assert finished[0].read_bytes() == b"all of it"
    assert target.read_bytes() == expected


# -- what else can go wrong ----------------------------------------------------------------------


def test_a_model_that_cannot_be_read_is_said_so(model, how, monkeypatch):
    stopped(how.write(model), 2)

    def broken(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr("llmaas_plugins.flash_weights.model_weights.read_array", broken)
        with pytest.raises(StoreError, match=r"cannot read blk\.\d\.\w+\.weight of .*Input/output"):
            list(how.write(model))
    assert partial_of(how.place(model)).exists()
    assert not how.place(model).exists()


def test_a_model_that_is_cut_off_meanwhile_is_said_so(model, how):
    writing = how.write(model)
    next(writing)
    os.truncate(model, 20_000)
    with pytest.raises(StoreError, match="the file ends within it"):
        list(writing)
    assert not how.place(model).exists()


def test_a_model_that_changes_meanwhile_is_not_packed(model, how):
    writing = how.write(model)
    next(writing)
    write_model(model, Type.Q4_0, n_layers=2, seed=5)
    with pytest.raises(StoreError, match="was changed while it was read"):
        list(writing)
    assert not how.place(model).exists()


def test_a_model_that_is_replaced_for_a_while_is_not_packed(model, how, monkeypatch):
    """Even if the digest is the expected one, before and after."""
    other, aside = model.with_name("other"), model.with_name("aside")
    write_model(other, Type.Q4_0, n_layers=2, seed=5)
    digest_of = model_weights.digest_of

    def replaced(path):
        if aside.exists():
            aside.replace(path)
            return digest_of(path)
        found = digest_of(path)
        model.replace(aside)
        other.replace(model)
        return found

    monkeypatch.setattr(model_weights, "digest_of", replaced)
    with pytest.raises(StoreError, match="was replaced while it was read; try again"):
        list(how.write(model))
    assert not how.place(model).exists()


def test_what_is_not_read_back_as_written_is_written_again(model, how, expected, monkeypatch):
    target, fsync = how.place(model), os.fsync

    def lossy(fd):
        fsync(fd)
        with partial_of(target).open("r+b") as file:
            file.seek(8192)
            file.write(b"\x00\xff\x55")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lossy)
        with pytest.raises(StoreError, match="read back differs from what was written"):
            list(how.write(model))
    assert not target.exists()
    list(how.write(model))
    assert target.read_bytes() == expected


def test_a_missing_model_and_a_missing_folder(model, how, tmp_path):
    tensors = tensors_of(model)
    with pytest.raises(StoreError, match=r"cannot read .*No such file"):
        list(write_packed(tmp_path / "none", tmp_path / "x", tensors, lambda _, plain: plain))
    with pytest.raises(StoreError, match=r"cannot write .*No such file or directory\.$"):
        list(write_packed(model, tmp_path / "no" / "x", tensors, lambda _, plain: plain))


def test_a_model_without_matrices_is_refused(model):
    with pytest.raises(ConfigError, match="no matrices to stream"):
        list(write_packed(model, packed_path(model), {}, lambda _, plain: plain))


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
        with how.place(model).open("r+b") as content:
            for name in damaged:
                content.seek(places[name] + 9)
                byte = content.read(1)[0]
                content.seek(places[name] + 9)
                content.write(bytes([byte ^ 1]))
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


def test_another_format_is_said_so(model, how, monkeypatch):
    list(how.write(model))
    newer = how.kind._replace(version=9)
    with pytest.raises(StoreError, match=f"format {how.kind.version}, expected 9"):
        ContainerFile(how.place(model), newer)
