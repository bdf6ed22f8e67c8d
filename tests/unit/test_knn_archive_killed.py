"""A writer that is killed at any step loses nothing, and what it began can be done again."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import dying
import pytest
from archived import BINDING, assert_holds, fill, record, record_id
from commands import run_python

from llmaas_plugins.knn_lm import archive as archive_module
from llmaas_plugins.knn_lm.archive import Archive

SEGMENT_BYTES = 26_000  # two records


@pytest.fixture
def left_by(tmp_path, monkeypatch):
    """What each death in a life leaves."""
    monkeypatch.setattr(archive_module, "_MOST_SEGMENT_BYTES", SEGMENT_BYTES)

    def live(life):
        fill(tmp_path / "store", map(record, sorted([*dying.KEPT, *dying.GONE])))
        (tmp_path / "left").mkdir()
        script = Path(dying.__file__)
        run_python(
            sys.executable, script, tmp_path / "store", tmp_path / "left", SEGMENT_BYTES, life,
            environ={"PYTHONPATH": str(script.parent)},
        )  # fmt: skip
        return sorted((tmp_path / "left").iterdir(), key=lambda path: int(path.name))

    return live


def seeds_in(store):
    seeds = {record_id(record(seed)): seed for seed in range(20)}
    with Archive.open(store) as archive:
        found = [seeds[id_] for id_ in archive.ids()]
        assert_holds(archive, [record(seed) for seed in found])
    return found


def segments(store):
    return [path for path in store.iterdir() if path.name != "lock"]


def test_forgetting_can_be_done_again(left_by):
    stores = left_by("forget")
    kept = [record(seed) for seed in dying.KEPT]
    gone = [record_id(record(seed)) for seed in dying.GONE]
    counts = set()
    for store in stores:
        found = seeds_in(store)
        assert set(found) >= set(dying.KEPT)
        counts.add(len(found))
        with Archive.open(store, writable=True) as archive:
            archive.forget(gone)
            assert_holds(archive, kept)
        content = b"".join(path.read_bytes() for path in store.iterdir())
        for seed in dying.GONE:
            assert f"question {seed}:".encode() not in content
        assert all(path.suffix == ".segment" for path in segments(store))
    assert counts == {7, 6, 4}  # segment by segment
    assert len(stores) > 15


def test_opening_to_write_erases_what_a_death_left(left_by):
    """Copies of what is forgotten do not wait for somebody to forget it again."""
    n_leftovers = 0
    for store in left_by("forget"):
        before = {path: path.open("rb") for path in segments(store)}
        with Archive.open(store, writable=True):
            pass
        for path, file in before.items():
            with file:
                if path.exists():
                    continue
                n_leftovers += 1
                assert set(file.read()) <= {0}
                assert os.fstat(file.fileno()).st_nlink == 0
        assert len(segments(store)) == len({path.name[:6] for path in segments(store)})
    assert n_leftovers > 5


def test_adding_goes_on_where_it_ended(left_by):
    stores = left_by("add")
    first = sorted([*dying.KEPT, *dying.GONE])
    counts = set()
    for store in stores:
        found = seeds_in(store)
        n_added = len(found) - len(first)
        assert found == [*first, *dying.ADDED[:n_added]]
        counts.add(n_added)
        with Archive.open(store, BINDING, writable=True) as archive:
            for seed in dying.ADDED[len(archive) - len(first) :]:
                archive.append(record(seed))
            assert_holds(archive, [record(seed) for seed in [*first, *dying.ADDED]])
    assert counts == {0, 1, 2, 3}
    assert len(stores) > 15
