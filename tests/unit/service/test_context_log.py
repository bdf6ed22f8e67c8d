"""The context log: committed records stay, and a foreign file stays untouched."""

from __future__ import annotations

import dataclasses
import sqlite3
import sys
import threading
import time

import fork_server
import pytest
from damages import FOREIGN, ODD, each, overwrite

from llmaas_hooks import StoreError
from llmaas_plugins.service.context_log import ContextLog, ContextRecord

MESSAGES = [
    {"role": "system", "content": "Be kind.\n\t\x00"},
    {"role": "user", "content": "Grüße, 世界 🦙 'quoted' \"twice\""},
]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "state"


@pytest.fixture
def log(folder):
    log = ContextLog(folder)
    yield log
    log.close()


def add(log, name, app="mail", **values):
    record = ContextRecord(name, app, **values)
    assert log.add(record, 100)
    return record


def test_everything_comes_back(log, folder):
    record = add(log, "a", messages=MESSAGES, n_tokens=7, n_calls=2, seen_from=1)
    assert log.get("a", "mail") == record
    log.close()
    again = ContextLog(folder)
    assert again.get("a", "mail") == record
    assert again.of_app("mail") == [record]
    again.close()


def test_update_replaces_what_a_call_changes(log):
    record = add(log, "a", created=1.0, used=1.0)
    record.messages, record.n_tokens, record.n_calls, record.used = MESSAGES, 9, 1, 2.0
    record.seen_from = 1
    assert log.update(record)
    assert log.get("a", "mail") == record


def test_update_does_not_bring_a_deleted_context_back(log):
    record = add(log, "a")
    assert log.delete("a", "mail")
    assert not log.update(record)
    assert log.get("a", "mail") is None
    assert log.delete("a", "mail")  # again, as long as the deletion has not ended
    log.end_deletion("a")
    assert not log.delete("a", "mail")


@pytest.mark.parametrize("has_kv", [False, True])
def test_a_name_waits_for_kv_only_if_there_can_be_kv(log, has_kv):
    add(log, "a")
    if has_kv:
        log.expect_kv("a")
    log.delete("a", "mail")
    assert log.deletions(with_kv=False) == ["a"]
    log.erase()
    log.leave_deletion("a")
    assert log.deletions() == ["a"] * has_kv
    assert log.deletions(with_kv=False) == []


def test_lacks(log):
    add(log, "a")
    assert (log.lacks("a"), log.lacks("b")) == (False, True)
    log.close()
    assert not log.lacks("b")


def test_most_recently_used_first(log):
    for name, used in (("old", 1.0), ("new", 3.0), ("middle", 2.0)):
        add(log, name, used=used)
    add(log, "other", "notes", used=9.0)
    assert [record.id for record in log.of_app("mail")] == ["new", "middle", "old"]
    assert log.of_app("nobody") == []


@pytest.mark.parametrize("clock", [5.0, 1.8e9, 4e9])
def test_time_goes_on_though_clocks_are_set_back(log, monkeypatch, clock):
    monkeypatch.setattr(time, "time", lambda: clock)
    assert log.now("mail") == clock
    add(log, "a", used=4e9)
    stamps = [4e9]
    for _ in range(1000):
        stamps.append(log.now("mail"))
        assert log.update(ContextRecord("a", "mail", used=stamps[-1]))
    assert sorted(set(stamps)) == stamps
    assert stamps[-1] - stamps[0] < 1
    assert log.now("notes") == clock


def test_closed(log):
    record = add(log, "a")
    log.close()
    log.close()
    for use in (
        lambda: log.get("a", "mail"),
        lambda: log.of_app("mail"),
        lambda: log.now("mail"),
        lambda: log.add(record, 9),
        lambda: log.update(record),
        lambda: log.delete("a", "mail"),
    ):
        with pytest.raises(StoreError, match="this service was closed"):
            use()


def test_a_full_disk_is_told_and_changes_nothing(log):
    small = ContextRecord("small", "mail")
    assert log.add(small, 16)
    (n_pages,) = log._db.execute("PRAGMA page_count").fetchone()
    log._db.execute(f"PRAGMA max_page_count={n_pages}")  # as on a full disk
    long = [{"role": "user", "content": "x" * 100_000}]
    for change in (
        lambda: log.add(ContextRecord("long", "mail", long), 16),
        lambda: log.update(dataclasses.replace(small, messages=long)),
    ):
        with pytest.raises(StoreError, match=r"disk is full\. Free space"):
            change()
    assert log.of_all() == [small]
    log._db.execute(f"PRAGMA max_page_count={1 << 20}")
    assert log.update(dataclasses.replace(small, messages=long))


def test_add_keeps_to_the_limit_with_threads(log):
    start, added = threading.Barrier(8), []

    def many(thread):
        start.wait()
        added.extend(log.add(ContextRecord(f"{thread}-{i}", "mail"), 3) for i in range(5))

    threads = [threading.Thread(target=many, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(added) == len(log.of_app("mail")) == 3
    assert log.add(ContextRecord("x", "notes"), 3)


def test_modes(log, folder):
    add(log, "a")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}
    assert (folder / "contexts.sqlite").is_file()


def test_a_file_that_others_could_read_is_made_private(log, folder):
    log.close()
    (folder / "contexts.sqlite").chmod(0o644)
    again = ContextLog(folder)
    add(again, "a")
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}
    again.close()


def test_close_leaves_one_file(log, folder):
    add(log, "a")
    log.close()
    assert [file.name for file in folder.iterdir()] == ["contexts.sqlite"]


def test_committed_before_a_kill(folder):
    script = (
        "import os, signal, sys, pathlib\n"
        "from llmaas_plugins.service.context_log import ContextLog, ContextRecord\n"
        "log = ContextLog(pathlib.Path(sys.argv[1]))\n"
        "log.add(ContextRecord('a', 'mail', n_tokens=5), 9)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = fork_server.run([sys.executable, "-c", script, folder])
    assert done.returncode == -9
    log = ContextLog(folder)
    assert log.get("a", "mail").n_tokens == 5
    log.close()


def sqlite_file(path, *statements):
    db = sqlite3.connect(path)
    for statement in statements:
        db.execute(statement)
    db.commit()
    db.close()


FORMAT_1 = (  # as version 0.1 wrote it
    """CREATE TABLE contexts (
    id TEXT PRIMARY KEY, app TEXT NOT NULL, messages TEXT NOT NULL,
    n_tokens INTEGER NOT NULL, n_calls INTEGER NOT NULL, created REAL NOT NULL, used REAL NOT NULL
) WITHOUT ROWID""",
    "CREATE INDEX contexts_by_app ON contexts (app, used)",
    """INSERT INTO contexts VALUES
    ('a', 'mail', '[{"role": "user", "content": "Grüße"}]', 7, 2, 1.5, 3.5),
    ('b', 'mail', '[]', 0, 0, 2.5, 2.5)""",
    "PRAGMA user_version=1",
)
OLD_RECORDS = [
    ContextRecord("a", "mail", [{"role": "user", "content": "Grüße"}], 7, 2, 1.5, 3.5, 0),
    ContextRecord("b", "mail", [], 0, 0, 2.5, 2.5, 0),
]


def test_format_1_is_brought_up_to_date(folder):
    folder.mkdir(mode=0o700)
    sqlite_file(folder / "contexts.sqlite", *FORMAT_1)
    for _ in range(2):
        log = ContextLog(folder)
        assert log.of_app("mail") == OLD_RECORDS
        log.close()
    log = ContextLog(folder)
    record = OLD_RECORDS[0]
    assert log.update(dataclasses.replace(record, seen_from=3))
    assert log.get("a", "mail").seen_from == 3
    log.close()


def test_format_1_by_several_at_a_time(folder):
    folder.mkdir(mode=0o700)
    sqlite_file(folder / "contexts.sqlite", *FORMAT_1)
    start, found = threading.Barrier(6), []

    def open_it():
        start.wait()
        log = ContextLog(folder)
        found.append(log.of_app("mail"))
        log.close()

    threads = [threading.Thread(target=open_it) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [OLD_RECORDS] * 6


def newer(path):
    sqlite_file(path, "CREATE TABLE contexts (id)", "PRAGMA user_version=6")


def foreign(path):
    sqlite_file(path, "CREATE TABLE bookmarks (url)", "INSERT INTO bookmarks VALUES ('x')")


def foreign_with_our_number(path):
    sqlite_file(path, "CREATE TABLE bookmarks (url)", "PRAGMA user_version=2")


def foreign_with_our_first_number(path):
    sqlite_file(path, "CREATE TABLE bookmarks (url)", "PRAGMA user_version=1")


def numbered_too_high(path):
    sqlite_file(path, *FORMAT_1, "PRAGMA user_version=2")


def empty_but_numbered(path):
    sqlite_file(path, "PRAGMA user_version=7")


def damaged(path):
    log = ContextLog(path.parent)
    for i in range(200):
        log.add(ContextRecord(f"context-{i}", "mail", MESSAGES), 200)
    log.close()
    overwrite(path, 4096, b"\xa5" * (path.stat().st_size - 4096))  # every page but the first


FILES = [
    newer,
    foreign,
    foreign_with_our_number,
    foreign_with_our_first_number,
    numbered_too_high,
    empty_but_numbered,
    damaged,
]


@each({**{make.__name__: make for make in FILES}, **FOREIGN}, but=["empty", "one byte"])
def test_a_file_that_cannot_be_used_is_refused_and_left_alone(folder, damage):
    folder.mkdir()
    path = folder / "contexts.sqlite"
    damage(path)
    before = path.read_bytes()
    with pytest.raises(StoreError) as caught:
        ContextLog(folder)
    assert str(path) in str(caught.value)
    assert "service.state_dir" in str(caught.value)
    assert path.read_bytes() == before
    assert list(folder.iterdir()) == [path]


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"file/state/contexts\.sqlite.*service\.state_dir"):
        ContextLog(tmp_path / "file" / "state")


@each(ODD)
def test_other_things_in_the_files_place(folder, damage):
    folder.mkdir()
    damage(folder / "contexts.sqlite")
    with pytest.raises(StoreError, match=r"contexts\.sqlite"):
        ContextLog(folder)
