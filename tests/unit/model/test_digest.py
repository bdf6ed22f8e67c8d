"""Digests of models: every byte of the loaded file counts, and no file is read twice."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
from damages import FOREIGN, NO_FILES, each, flip
from elastic_models import shuffled, write
from families import write_family
from forking import in_child
from rewritten_models import write_split

from llmaas_hooks import StoreError
from llmaas_plugins.elastic.metadata import read_elastic
from llmaas_plugins.elastic.prepared_file import replace_metadata
from llmaas_plugins.files import digest_cache
from llmaas_plugins.model import digest as model_digest
from llmaas_plugins.model.digest import Digest, begin_digest, changed_in_place, files_now
from llmaas_plugins.model.gguf_header import read_header

PIECE = 1000


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    """Make pieces small, trust every file state, and forget all known digests."""
    monkeypatch.setattr(model_digest, "_PIECE_BYTES", PIECE)
    monkeypatch.setattr(model_digest, "_SETTLED_NS", -(1 << 62))
    monkeypatch.setattr(model_digest, "records_mapped_writes", lambda _: True)
    monkeypatch.setattr(model_digest, "_known", {})
    monkeypatch.setattr(digest_cache, "_directory", lambda: tmp_path / "cache")
    digest_cache._tell.cache_clear()


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(np.random.default_rng(0).bytes(5 * PIECE + 7))
    os.utime(path, (1, 1))  # clocks of file systems are coarse
    return path


def entries():
    return sorted(digest_cache._directory().iterdir())


def never_read(monkeypatch):
    monkeypatch.setattr(model_digest, "_leaves", lambda *_: pytest.fail("the file was read"))


def digest(path):
    return model_digest.file_digest(path)


# -- what it is of -------------------------------------------------------------------------------


def test_every_byte_and_the_length_count(path):
    content, found = path.read_bytes(), {digest(path)}
    for at in (0, PIECE - 1, PIECE, 3 * PIECE + 500, len(content) - 1):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        found.add(digest(path))
    for other in (content[:-1], content + b"\0", content[PIECE:] + content[:PIECE], b""):
        path.write_bytes(other)
        found.add(digest(path))
    assert len(found) == 10


def test_equal_files_have_equal_digests_whatever_reads_them(path, monkeypatch):
    copy = path.with_name("copy.gguf")
    copy.write_bytes(path.read_bytes())
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    one = digest(path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert digest(copy) == one


@pytest.mark.slow
def test_every_split_counts(tmp_path):
    digests = set()
    for seed in range(2):
        paths = write_split(write_family("llama", tmp_path / f"{seed}.gguf", seed=seed), 2)
        digests |= {digest(paths[0]), digest(paths[1])}
        if seed == 0:
            first = paths[0].read_bytes()
    paths[0].write_bytes(first)  # the other model's content, before these others
    assert len(digests | {digest(paths[0])}) == 5


def test_a_file_named_like_a_split_is_one_file(path):
    named = path.rename(path.with_name("x-00001-of-00002.gguf"))
    assert [file.path for file in files_now(named)] == [str(named)]


# -- the file that was loaded ----------------------------------------------------------------------


def test_a_models_digest_is_that_of_all_its_bytes(tmp_path):
    """Stores of models that are not prepared stay valid."""
    path = write_family("llama", tmp_path / "model.gguf")
    content = path.read_bytes()
    pieces = [content[at : at + PIECE] for at in range(0, len(content), PIECE)]
    leaves = [blake2b(piece, digest_size=32, person=b"llmaas-piece").digest() for piece in pieces]
    whole = len(content).to_bytes(8, "little") + b"".join(leaves)
    assert digest(path) == blake2b(whole, digest_size=32, person=b"llmaas-file").hexdigest()


def test_widths_of_levels_do_not_count(tmp_path):
    source = write_family("llama", tmp_path / "model.gguf")
    path = shuffled(source, tmp_path / "prepared.gguf")
    found, before = digest(path), path.read_bytes()
    elastic = read_elastic(path)
    tables = {**elastic.tables, "searched": elastic.tables["uniform"]}
    write(replace_metadata(path, dataclasses.replace(elastic, tables=tables)))
    assert len(path.read_bytes()) > len(before)
    assert set(read_elastic(path).tables) == {"uniform", "searched"}
    assert digest(path) == found


@pytest.mark.slow
def test_all_other_bytes_of_a_prepared_file_count(tmp_path):
    path = shuffled(write_family("llama", tmp_path / "model.gguf"), tmp_path / "prepared.gguf")
    content, found = path.read_bytes(), {digest(path)}
    header = read_header(path)
    places = [tensor.at for tensor in header.tensors.values()]
    places += [tensor.at + tensor.n_bytes - 1 for tensor in header.tensors.values()]
    places += [header.spans["llama.block_count"][1] - 4, header.spans["llama.vocab_size"][1] - 4]
    places += [header.spans["llama.context_length"][0] + 8, header.infos_at + 9]
    if header.data_at > header.infos_end:
        places.append(header.data_at - 1)
    for at in places:
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        found.add(digest(path))
    for other in (content + b"\0", content[:-1]):
        path.write_bytes(other)
        found.add(digest(path))
    assert len(found) == len(set(places)) + 3


def test_fields_of_similar_names_count(tmp_path):
    path = shuffled(write_family("llama", tmp_path / "model.gguf"), tmp_path / "prepared.gguf")
    content, found = path.read_bytes(), digest(path)
    assert content.count(b"llmaas.elastic.groups") == 1
    path.write_bytes(content.replace(b"llmaas.elastic.groups", b"llmaas.elastic_groups"))
    assert digest(path) != found


def replace(path):
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.replace(path)


def rewrite(path):
    path.write_bytes(path.read_bytes())


@pytest.mark.parametrize("change", [replace, rewrite, Path.unlink, os.utime])
def test_a_file_that_is_not_what_was_loaded_has_no_digest(path, change):
    files = files_now(path)
    change(path)
    with pytest.raises(StoreError, match=r"cannot tell which model .*model\.gguf is"):
        begin_digest(files).get()
    assert not digest_cache._directory().exists()


def test_a_file_that_changes_while_it_is_read_has_no_digest(path, monkeypatch):
    leaves = model_digest._leaves

    def changing(fd, n_bytes, read):
        found = leaves(fd, n_bytes, read)
        rewrite(path)
        return found

    monkeypatch.setattr(model_digest, "_leaves", changing)
    with pytest.raises(StoreError, match="replaced or changed after it was loaded"):
        digest(path)


def test_a_file_that_is_deleted_while_it_is_read_keeps_its_digest(path, monkeypatch):
    expected, leaves = digest(path), model_digest._leaves
    copy = path.with_name("copy.gguf")
    copy.write_bytes(path.read_bytes())

    def deleting(fd, n_bytes, read):
        copy.unlink()
        return leaves(fd, n_bytes, read)

    monkeypatch.setattr(model_digest, "_leaves", deleting)
    assert digest(copy) == expected


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: None])
def test_what_is_no_readable_file_is_refused_at_once(tmp_path, make):
    odd = tmp_path / "odd"
    make(odd)
    with pytest.raises(StoreError, match=r"cannot read .*odd"):
        digest(odd)
    with pytest.raises(StoreError, match="not a readable regular file"):
        begin_digest(files_now(odd)).get()


def test_writing_to_a_file_in_use_is_noticed_and_replacing_it_is_none(path):
    files = files_now(path)
    assert not changed_in_place(files)
    replace(path)
    assert not changed_in_place(files)
    files = files_now(path)
    path.write_bytes(b"other")
    assert changed_in_place(files)
    path.unlink()
    assert not changed_in_place(files)


# -- what is known -------------------------------------------------------------------------------


def test_a_file_is_read_once_by_a_process_and_by_later_ones(path, monkeypatch):
    found = digest(path)
    never_read(monkeypatch)
    assert digest(path) == found
    model_digest._known.clear()  # another process
    assert digest(path) == found
    link = path.with_name("link.gguf")
    link.symlink_to(path)
    assert digest(link) == found


def test_bytes_that_are_read_are_counted(path, monkeypatch):
    found = model_digest.begin_file_digest(path)
    found.get()
    assert found.n_read == path.stat().st_size
    monkeypatch.setattr(model_digest, "_known", {})
    cached = model_digest.begin_file_digest(path)
    assert (cached.get(), cached.n_read) == (found.get(), 0)


def test_a_file_that_was_written_just_now_is_read_again(path, monkeypatch):
    """Two contents may have the same time."""
    monkeypatch.setattr(model_digest, "_SETTLED_NS", 1 << 62)
    found = digest(path)
    assert model_digest._known == {}
    assert not digest_cache._directory().exists()
    assert digest(path) == found


def test_a_load_of_such_a_file_reads_it_once(path, monkeypatch):
    monkeypatch.setattr(model_digest, "_SETTLED_NS", 1 << 62)
    files, again = files_now(path), files_now(path)
    begun = begin_digest(files)
    found = begun.get()
    assert begin_digest(files) is begun
    assert begin_digest(again) is not begun
    del begun
    assert begin_digest(files).get() == found


CHANGED = {
    "flipped bit": lambda entry: flip(entry, 0),
    "cut": lambda entry: os.truncate(entry, 47),
    "longer": lambda entry: os.truncate(entry, 49),
}


@each({**CHANGED, **FOREIGN, **NO_FILES})
def test_a_damaged_entry_is_found_out_and_mended(path, damage, monkeypatch):
    found = digest(path)
    (entry,) = entries()
    assert entry.stat().st_size == 48
    damage(entry)
    model_digest._known.clear()
    assert digest(path) == found
    if not entry.is_dir():
        model_digest._known.clear()
        never_read(monkeypatch)
        assert digest(path) == found


def test_entries_are_private_and_their_number_is_bounded(path, monkeypatch):
    monkeypatch.setattr(digest_cache, "_MOST_ENTRIES", 4)
    for i in range(9):
        copy = path.with_name(f"{i}.gguf")
        copy.write_bytes(bytes([i]))
        digest(copy)
        assert len(entries()) <= 4
    assert {entry.stat().st_mode & 0o777 for entry in entries()} == {0o600}
    assert digest_cache._directory().stat().st_mode & 0o777 == 0o700


def test_without_a_cache_it_says_so_once_and_goes_on(path, caplog, monkeypatch):
    digest_cache._directory().write_bytes(b"a file in the way")
    with caplog.at_level(logging.WARNING, "llmaas"):
        for _ in range(2):
            model_digest._known.clear()
            found = digest(path)
    assert len(caplog.messages) == 1
    assert "each start reads whole model files" in caplog.text
    monkeypatch.setattr(digest_cache, "_directory", lambda: path.parent / "another")
    model_digest._known.clear()
    assert digest(path) == found


def test_on_a_full_disk_nothing_half_written_is_left(path, monkeypatch):
    def write(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(digest_cache.os, "write", write)
        digest(path)
    assert entries() == []


# -- threads and forks ----------------------------------------------------------------------------


@pytest.fixture
def slow(monkeypatch):
    """Make digest threads wait for this event."""
    event, root = threading.Event(), model_digest._file_root

    def file_root(file, read):
        if threading.current_thread().name == "llmaas-digest":
            event.wait()
        return root(file, read)

    monkeypatch.setattr(model_digest, "_file_root", file_root)
    yield event
    event.set()


def test_nobody_waits_longer_than_asked(path, slow):
    found = begin_digest(files_now(path))
    assert found.get(0) is None
    assert found.get(0.01) is None
    assert begin_digest(files_now(path)) is found
    slow.set()
    assert found.get() == found.get(0)


def test_a_forked_child_finds_it_itself(path, slow):
    found = Digest(files_now(path))

    def work():
        assert len(found.get() or "") == 64

    assert in_child(work) == 0
    slow.set()
    assert found.get() is not None


def test_an_error_that_comes_at_once_is_not_kept(path, monkeypatch):
    class AtOnce:
        """A thread that is done before anybody looks."""

        def __init__(self, target, **_):
            self.ident, self.start = 1, target

        def join(self, *_):
            pass

        def is_alive(self):
            return False

    def fails(_file, _read):
        raise OSError(24, "Too many open files")

    files = files_now(path)
    with monkeypatch.context() as patch:
        patch.setattr(model_digest.threading, "Thread", AtOnce)
        patch.setattr(model_digest, "_file_root", fails)
        failed = begin_digest(files)
    with pytest.raises(StoreError, match="Too many open files"):
        failed.get()
    assert begin_digest(files).get() == digest(path)


def test_an_error_of_one_thread_ends_all(path, monkeypatch):
    def read(_fd, _room, at):
        if at == 2 * PIECE:
            raise OSError(5, "Input/output error")
        return min(PIECE, 5 * PIECE + 7 - at)

    monkeypatch.setattr(model_digest, "read_into", read)
    with pytest.raises(StoreError, match="Input/output error"):
        digest(path)
    monkeypatch.undo()
