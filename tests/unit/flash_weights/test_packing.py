"""Packing can stop at any time for any reason and continue; existing files are checked."""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path

import containers
import fork_server
import pytest
from containers import Channelled, Packed, partial_of, stopped
from damages import FOREIGN, LINKS, ODD, content, each, overwrite
from flash_models import tensors_of, write_model
from gguf import GGMLQuantizationType as Type

from llmaas_hooks import ConfigError, StoreError
from llmaas_plugins.files import partial_file
from llmaas_plugins.flash_weights import model_weights
from llmaas_plugins.flash_weights.container_file import ContainerFile
from llmaas_plugins.flash_weights.packed import (
    packed_path,
    write_packed,
)


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
    overwrite(partial_of(target), place, b"\x12\x34\x56")
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


@each({**FOREIGN, "magic": content(b"GGUF")})
def test_what_somebody_else_left_there_is_not_built_upon(model, how, expected, damage):
    target = how.place(model)
    damage(partial_of(target))
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


@each({**LINKS, **ODD})
def test_what_is_no_file_is_left_alone(model, how, damage):
    partial = partial_of(how.place(model))
    partial.write_bytes(b"precious")
    damage(partial)
    others = set(model.parent.iterdir())
    with pytest.raises(StoreError):
        list(how.write(model))
    assert set(model.parent.iterdir()) == others
    assert damage is not LINKS["link"] or partial.read_bytes() == b"precious"


def test_only_one_at_a_time_writes_it(model, how, expected):
    first = how.write(model)
    next(first)
    with pytest.raises(StoreError, match="is being written by another process"):
        next(how.write(model))
    list(first)
    assert how.place(model).read_bytes() == expected


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[3])
import containers
from pathlib import Path
for i, _ in enumerate(getattr(containers, sys.argv[1]).write(Path(sys.argv[2]))):
    if i == 3:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_wrote_is_kept(model, how, expected, reads):
    folder = str(Path(containers.__file__).parent)
    command = [sys.executable, "-c", KILLED, how.__name__, str(model), folder]
    assert fork_server.run(command).returncode == -signal.SIGKILL
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
        overwrite(partial_of(target), 8192, b"\x00\xff\x55")

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
    with pytest.raises(StoreError, match=r"cannot write .*No such file or directory\. It must be "):
        list(write_packed(model, tmp_path / "no" / "x", tensors, lambda _, plain: plain))


def test_a_model_without_matrices_is_refused(model):
    with pytest.raises(ConfigError, match="no matrices to stream"):
        list(write_packed(model, packed_path(model), {}, lambda _, plain: plain))
