"""``llmaas store``: each action, on stores that are sound, damaged, foreign or in use."""

from __future__ import annotations

import json
import os
import sqlite3
import stat
import subprocess
import sys
import threading

import numpy as np
import pytest
from stored_chunks import payload, put

from llmaas_plugins._native import Budget, KVGeometry
from llmaas_plugins.cli.main import main
from llmaas_plugins.kv_chunks.maintenance import checking
from llmaas_plugins.kv_chunks.store.chunk_ids import chain
from llmaas_plugins.kv_chunks.store.chunk_store import ChunkStore
from llmaas_plugins.kv_chunks.store.disk_store import DiskStore
from llmaas_plugins.kv_chunks.store.extents import PAGE
from llmaas_plugins.kv_chunks.store.store_format import FORMAT

ROOT, OTHER_MODEL = b"r" * 32, b"o" * 32
GEOM = KVGeometry(1, False, 1, 1, (64,), (64,))  # a chunk is one page
BUDGET = 1 << 20
A = np.arange(100, dtype=np.int32)  # 7 chunks
B = np.concatenate([A[:32], np.arange(500, 548, dtype=np.int32)])  # 2 chunks of A and 3 more
C = np.arange(900, 932, dtype=np.int32)  # 2 chunks of another model


def open_store(directory):
    return ChunkStore(Budget(BUDGET), DiskStore(directory, BUDGET))


def save(store, root, tokens, name=None):
    put(store, GEOM, chain(root, tokens), name)


def n_loaded(directory, root, tokens):
    """Return the number of tokens that a new process gets back."""
    store = open_store(directory)
    path, n_tokens = store.match(root, tokens)
    n = sum(chunk.n_tokens for chunk in path[: len(store.reader.fetch(path))])
    store.reader.unpin(path)
    store.close()
    return min(n, n_tokens)


@pytest.fixture
def kv(tmp_path):
    store = open_store(tmp_path / "kv")
    for root in (ROOT, OTHER_MODEL):
        store.set_layout(root, '{"n_layer": 1}')
    save(store, ROOT, A, "mail")
    save(store, ROOT, B, "notes")
    save(store, OTHER_MODEL, C)
    store.touch(chain(ROOT, A))
    store.close()
    return tmp_path / "kv"


@pytest.fixture
def run(capsys, kv):
    """Return a function that runs an action on the store and returns its exit code and report."""

    def run(action, *args, store=kv):
        code = main(["store", action, "--json", "--store", str(store), *map(str, args)])
        captured = capsys.readouterr()
        if code == 2:
            assert captured.out == ""
            assert captured.err.startswith("llmaas: error: ")
            assert captured.err.count("\n") == 1
            return code, captured.err
        return code, json.loads(captured.out)

    return run


def files(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def place(kv, root, tokens, i):
    with sqlite3.connect(kv / "index.sqlite") as db:
        found = db.execute("SELECT offset FROM chunks WHERE key=?", (chain(root, tokens)[i].key,))
        (offset,) = found.fetchone()
    db.close()
    return PAGE + offset


def damage(kv, root, tokens, i):
    offset = place(kv, root, tokens, i)
    with (kv / "chunks.slab").open("r+b") as file:
        file.seek(offset + 300)
        file.write(b"\xa5\x5a")


def edit(kv, statement, *values):
    db = sqlite3.connect(kv / "index.sqlite")
    db.execute(statement, values)
    db.commit()
    db.close()


# -- stats --------------------------------------------------------------------------------------


def test_stats(run, kv):
    before = files(kv)
    code, found = run("stats")
    assert code == 0
    assert found["store"] == str(kv)
    assert (found["format"], found["holder"], found["unsound_rows"]) == (FORMAT, None, 0)
    assert found["contexts"] == ["notes", "mail"]
    assert (found["oldest"], found["newest"]) == ("notes", "mail")
    assert found["chunks"] == 12
    assert found["slab_bytes"] == 13 * PAGE
    assert found["index_bytes"] > 0
    assert found["disk_bytes"] > found["slab_bytes"]
    assert found["budget_bytes"] == 4 << 30
    assert found["models"] == [
        {"root": ROOT.hex(), "chunks": 10, "is_known": True},
        {"root": OTHER_MODEL.hex(), "chunks": 2, "is_known": True},
    ]
    assert files(kv) == before


def test_stats_as_text(kv, capsys):
    assert main(["store", "stats", "--store", str(kv)]) == 0
    out = capsys.readouterr().out
    assert f"{kv}  (format {FORMAT})" in out
    assert "nobody" in out
    words = out.split()
    assert words[words.index("first") + 1 :][:2] == ["mail,", "notes"]
    assert "52 KiB of 4096.0 MiB" in out


def test_odd_names_do_not_reach_the_terminal(kv, capsys):
    edit(kv, "UPDATE contexts SET id = x'1b5b324a' || id")
    assert main(["store", "stats", "--store", str(kv)]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_store_and_budget_come_from_the_configuration(kv, tmp_path, capsys, monkeypatch):
    config = tmp_path / "llmaas.toml"
    config.write_text(f'[plugins.kv_chunks]\nstore = "{kv}"\ndisk_budget = "7 MiB"\n')
    assert main(["store", "stats", "--json", "--config", str(config)]) == 0
    assert json.loads(capsys.readouterr().out)["budget_bytes"] == 7 << 20
    monkeypatch.setenv("LLMAAS_CONFIG", str(config))
    assert main(["store", "check"]) == 0
    assert f"12 chunks in {kv}: sound" in capsys.readouterr().out


@pytest.mark.parametrize("action", ["stats", "check", "gc", ("export", "out"), ("forget", "--all")])
def test_no_store_is_an_error_and_makes_none(run, tmp_path, action):
    action, *args = [action] if isinstance(action, str) else action
    for place in (tmp_path / "none", tmp_path):
        code, message = run(action, *args, store=place)
        assert code == 2
        assert f"there is no KV store in {place}. Name its directory with --store" in message
    assert not (tmp_path / "none").exists()
    assert not (tmp_path / "index.sqlite").exists()


@pytest.mark.parametrize("action", ["stats", "check", "gc", ("export", "out"), ("forget", "--all")])
def test_newer_store_is_refused_and_left_as_it_is(run, kv, action):
    action, *args = [action] if isinstance(action, str) else action
    edit(kv, f"PRAGMA user_version={FORMAT + 1}")
    before = files(kv)
    code, message = run(action, *args)
    assert code == 2
    assert (
        f"has format {FORMAT + 1}, but this version of llmaas_plugins reads format {FORMAT}"
        in message
    )
    assert {name: data for name, data in files(kv).items() if name != "lock"} == {
        name: data for name, data in before.items() if name != "lock"
    }


# -- check --------------------------------------------------------------------------------------


def test_sound_store(run, kv):
    before = files(kv)
    code, found = run("check")
    assert (code, found["problems"], found["chunks"]) == (0, [], 12)
    assert files(kv) == before


def test_damaged_chunk_is_named_and_repaired(run, kv):
    damage(kv, ROOT, A, 3)
    key = chain(ROOT, A)[3].key.hex()[:12]
    code, found = run("check")
    assert (code, found["problems"]) == (1, [f"chunk {key}: its bytes are damaged"])
    code, found = run("check", "--repair")
    assert (code, found["repaired"]) == (0, True)
    assert run("check") == (0, found | {"problems": [], "repaired": False, "chunks": 8})
    assert n_loaded(kv, ROOT, A) == 48
    assert n_loaded(kv, ROOT, B) == len(B)
    assert run("stats")[1]["contexts"] == ["notes", "mail"]


HARM = {
    "another chunk is stored in its place": "UPDATE chunks SET offset = 40960 - offset",
    "invalid rows in the index": "UPDATE chunks SET offset = 1 << 50 WHERE offset = 0",
    "invalid rows in the index: 1": "UPDATE chunks SET tokens = x'' WHERE offset = 0",
    "the index cannot be used": "DROP TABLE contexts",
    "its tables are not those of a store": "CREATE VIEW more AS SELECT * FROM chunks",
    "context 'mail': its last chunk is missing": "UPDATE contexts SET head = zeroblob(32)",
    "the chunk before it is missing": "DELETE FROM geometry",
    "it cannot be read": None,
    "the slab's header does not belong to the index": "UPDATE store SET id = zeroblob(16)",
}


@pytest.mark.parametrize(("problem", "statement"), HARM.items(), ids=HARM)
def test_harm_is_told_and_repaired(run, kv, problem, statement):
    if statement is None:
        os.truncate(kv / "chunks.slab", 12 * PAGE + 2000)
        problem = "invalid rows"
    else:
        edit(kv, statement)
    code, found = run("check")
    assert code == 1
    assert any(problem in said for said in found["problems"])
    assert run("check", "--repair")[0] == 0
    assert run("check")[0] == 0
    store = open_store(kv)
    save(store, ROOT, A, "mail")
    store.close()
    assert n_loaded(kv, ROOT, A) == len(A)


def test_trigger_in_the_index_is_never_run(run, kv):
    edit(kv, "CREATE TRIGGER t AFTER DELETE ON chunks BEGIN DELETE FROM contexts; END")
    assert run("check")[0] == 1
    assert run("stats")[0] == 2


@pytest.mark.parametrize("name", ["chunks.slab", "index.sqlite", "lock"])
def test_link_is_not_followed(run, kv, tmp_path, name):
    (kv / name).rename(tmp_path / "elsewhere")
    (kv / name).symlink_to(tmp_path / "elsewhere")
    before = (tmp_path / "elsewhere").read_bytes()
    for action in ("stats", "check", "gc"):
        code, message = run(action)
        assert code == 2
        assert f"{name} is a symbolic link. Remove it, or set" in message
    assert (tmp_path / "elsewhere").read_bytes() == before


def test_text_names_the_next_step(kv, capsys):
    damage(kv, ROOT, A, 3)
    assert main(["store", "check", "--store", str(kv)]) == 1
    out = capsys.readouterr().out
    assert "12 chunks in" in out
    assert "1 problem(s)" in out
    assert "`llmaas store check --repair` drops damaged data." in out


# -- a store in use -----------------------------------------------------------------------------


def test_store_in_use_can_be_looked_at_and_not_changed(run, kv, tmp_path):
    store = open_store(kv)
    save(store, ROOT, C, "third")
    store.flush()
    code, found = run("stats")
    assert (code, found["holder"], found["chunks"]) == (0, "this process already", 14)
    assert set(found["contexts"]) == {"mail", "notes", "third"}  # still in the log only
    assert run("check")[1]["problems"] == []
    assert run("export", tmp_path / "copy")[0] == 0
    for action in (["gc"], ["forget", "mail"], ["forget", "--all"]):
        code, message = run(*action)
        assert code == 2
        assert "is in use by this process already. Stop it, or set" in message
    damage(kv, ROOT, A, 6)
    assert run("check", "--repair")[0] == 2
    assert len(store.tree) == 14
    store.close()
    assert n_loaded(kv, ROOT, C) == len(C)


HOLD = """
import sys
from pathlib import Path
from llmaas_plugins.kv_chunks.maintenance import checking
from llmaas_plugins.kv_chunks.store.disk_store import DiskStore
store = DiskStore(Path(sys.argv[1]), 1 << 20)
print("open", flush=True)
sys.stdin.read()
"""


def test_holder_is_named_and_forgotten_when_it_dies(run, kv):
    command = [sys.executable, "-c", HOLD, str(kv)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout.readline() == "open\n"
        assert run("stats")[1]["holder"].startswith(f"process {holder.pid} (python")
        code, message = run("gc")
        assert code == 2
        assert f"is in use by process {holder.pid} (python" in message
        holder.kill()
    assert (kv / "lock").read_text().startswith(f"{holder.pid}\n")  # the holder could not clean up
    assert run("stats")[1]["holder"] is None
    assert run("gc")[0] == 0
    assert (kv / "lock").read_text() == ""


def test_chunks_written_behind_the_index_are_not_damage(run, kv, monkeypatch):
    """The holder evicted chunks and reused their space; its commit comes a moment later."""
    store = open_store(kv)
    store.reader.drop_damaged(store.tree.get(chain(ROOT, A)[6].key))
    store.reader.drop_damaged(store.tree.get(chain(ROOT, B)[4].key))
    save(store, ROOT, np.arange(3000, 3032, dtype=np.int32))
    commit = store._writer.commit
    store._writer.commit = lambda: None
    store.flush()
    store._writer.commit = commit
    monkeypatch.setattr(checking, "_RECHECK_S", 0)
    assert len(run("check")[1]["problems"]) == 2
    monkeypatch.undo()
    later = threading.Timer(0.3, commit)
    later.start()
    assert run("check")[1]["problems"] == []
    later.join()
    store.close()


# -- forget -------------------------------------------------------------------------------------


def on_disk(kv):
    return b"".join(path.read_bytes() for path in kv.iterdir())


def test_forgotten_context_is_gone_from_the_disk(run, kv):
    only_mail, shared = chain(ROOT, A)[2:], chain(ROOT, A)[:2]
    code, found = run("forget", "mail")
    assert (code, found["n_contexts"], found["n_chunks"]) == (0, 1, 5)
    assert found["freed_bytes"] > 0
    left = on_disk(kv)
    for wanted in only_mail:
        assert payload(GEOM, wanted)[128:] not in left
        assert wanted.tokens not in left
        assert wanted.key not in left
    assert all(payload(GEOM, wanted) in left for wanted in shared)
    assert n_loaded(kv, ROOT, B) == len(B)
    assert run("stats")[1]["contexts"] == ["notes"]


def test_everything_can_be_forgotten(run, kv):
    (kv / "index.sqlite.unusable").write_bytes(A.tobytes())
    code, found = run("forget", "--all")
    assert (code, found["n_contexts"], found["n_chunks"]) == (0, 2, 12)
    assert run("stats")[1]["chunks"] == 0
    assert (kv / "chunks.slab").stat().st_size == PAGE
    left = on_disk(kv)
    for root, tokens in ((ROOT, A), (ROOT, B), (OTHER_MODEL, C)):
        for wanted in chain(root, tokens):
            assert payload(GEOM, wanted)[128:] not in left
            assert wanted.tokens not in left


def test_unknown_context_changes_nothing(run, kv):
    before = files(kv)
    code, message = run("forget", "mail", "male")
    assert code == 2
    assert "no such context: 'male'; nothing was changed. `llmaas store stats`" in message
    assert run("check")[1]["chunks"] == 12
    assert files(kv)["chunks.slab"] == before["chunks.slab"]


@pytest.mark.parametrize("args", [[], ["mail", "--all"]])
def test_forget_wants_names_or_all(run, args):
    with pytest.raises(SystemExit) as caught:
        run("forget", *args)
    assert caught.value.code == 2


# -- gc -----------------------------------------------------------------------------------------


def test_gc_drops_what_nobody_can_reach_and_gives_space_back(run, kv):
    # three more chunks follow it
    edit(kv, "DELETE FROM chunks WHERE key = ?", chain(ROOT, A)[3].key)
    edit(kv, "UPDATE chunks SET used = 100 WHERE key = ?", chain(ROOT, A)[6].key)
    damage(kv, OTHER_MODEL, C, 1)
    with (kv / "chunks.slab").open("ab") as file:
        file.write(b"x" * (64 * PAGE))  # from a larger budget, or from a flush that was killed
    (kv / "index.sqlite.unusable").write_bytes(b"x" * 50_000)
    code, found = run("gc")
    assert (code, found["n_chunks"]) == (0, 4)
    assert found["freed_bytes"] >= 64 * PAGE
    assert not (kv / "index.sqlite.unusable").exists()
    assert run("check")[1] == {
        "store": str(kv), "holder": None, "chunks": 7, "problems": [], "repaired": False,
    }  # fmt: skip
    assert (kv / "chunks.slab").stat().st_size <= 13 * PAGE
    assert (n_loaded(kv, ROOT, A), n_loaded(kv, ROOT, B)) == (48, len(B))
    assert run("gc")[1] == {"n_contexts": 0, "n_chunks": 0, "freed_bytes": 0}


# -- export -------------------------------------------------------------------------------------


def test_export_of_everything(run, kv, tmp_path):
    before = files(kv)
    code, found = run("export", tmp_path / "copy")
    assert (code, found["n_contexts"], found["n_chunks"], found["skipped"]) == (0, 2, 12, 0)
    assert files(kv) == before
    copy = tmp_path / "copy"
    assert stat.S_IMODE(copy.stat().st_mode) == 0o700
    assert run("check", store=copy)[0] == 0
    theirs, ours = run("stats", store=copy)[1], run("stats")[1]
    for key in ("contexts", "chunks", "chunk_bytes", "models", "oldest", "newest"):
        assert theirs[key] == ours[key]
    for root, tokens in ((ROOT, A), (ROOT, B), (OTHER_MODEL, C)):
        assert n_loaded(copy, root, tokens) == len(tokens)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "kv"]


def test_export_of_one_context_holds_nothing_else(run, kv, tmp_path):
    code, found = run("export", tmp_path / "copy", "--context", "notes")
    assert (code, found["n_contexts"], found["n_chunks"]) == (0, 1, 5)
    copy = tmp_path / "copy"
    assert run("stats", store=copy)[1]["contexts"] == ["notes"]
    assert (n_loaded(copy, ROOT, B), n_loaded(copy, ROOT, A)) == (len(B), 32)
    left = on_disk(copy)
    assert all(wanted.tokens not in left for wanted in chain(ROOT, A)[2:])


def test_export_leaves_damage_behind_and_says_so(run, kv, tmp_path):
    damage(kv, ROOT, A, 3)
    code, found = run("export", tmp_path / "copy")
    assert (code, found["n_chunks"], found["skipped"]) == (1, 8, 4)
    assert run("check", store=tmp_path / "copy")[0] == 0
    assert n_loaded(tmp_path / "copy", ROOT, A) == 48
    assert set(run("stats", store=tmp_path / "copy")[1]["contexts"]) == {"mail", "notes"}


def test_export_overwrites_nothing(run, kv, tmp_path):
    (tmp_path / "there").mkdir()
    for target in (tmp_path / "there", kv, kv / "lock"):
        code, message = run("export", target)
        assert code == 2
        assert f"{target} already exists; nothing was written" in message
    code, message = run("export", tmp_path / "missing/copy")
    assert code == 2
    assert "cannot write" in message
    code, message = run("export", tmp_path / "copy", "--context", "male")
    assert code == 2
    assert "no such context: 'male'" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kv", "there"]
