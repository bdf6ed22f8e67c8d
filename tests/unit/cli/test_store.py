"""``llmaas store``: each action, on stores that are sound, foreign or in use."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import threading

import fork_server
import numpy as np
import pytest
from damages import files
from kv_stores import (
    GEOM,
    OTHER_MODEL,
    ROOT,
    A,
    B,
    C,
    damage_chunk,
    edit,
    n_loaded,
    on_disk,
    open_store,
    save,
)
from stored_chunks import payload

from llmaas_plugins.cli.main import main
from llmaas_plugins.kv_chunks.maintenance import checking
from llmaas_plugins.kv_chunks.store.chunk_ids import chain
from llmaas_plugins.kv_chunks.store.extents import PAGE
from llmaas_plugins.kv_chunks.store.store_format import FORMAT

# -- stats --------------------------------------------------------------------------------------


def test_stats(run_store, kv):
    before = files(kv)
    code, found = run_store("stats")
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
def test_no_store_is_an_error_and_makes_none(run_store, tmp_path, action):
    action, *args = [action] if isinstance(action, str) else action
    for place in (tmp_path / "none", tmp_path):
        code, message = run_store(action, *args, store=place)
        assert code == 2
        assert f"there is no KV store in {place}. Name its directory with --store" in message
    assert not (tmp_path / "none").exists()
    assert not (tmp_path / "index.sqlite").exists()


@pytest.mark.parametrize("action", ["stats", "check", "gc", ("export", "out"), ("forget", "--all")])
def test_newer_store_is_refused_and_left_as_it_is(run_store, kv, action):
    action, *args = [action] if isinstance(action, str) else action
    edit(kv, f"PRAGMA user_version={FORMAT + 1}")
    before = files(kv, but=["lock"])
    code, message = run_store(action, *args)
    assert code == 2
    assert (
        f"has format {FORMAT + 1}, but this version of llmaas_plugins reads format {FORMAT}"
        in message
    )
    assert files(kv, but=["lock"]) == before


# -- a store in use -----------------------------------------------------------------------------


@pytest.mark.slow
def test_store_in_use_can_be_looked_at_and_not_changed(run_store, kv, tmp_path):
    store = open_store(kv)
    save(store, C, "third")
    store.flush()
    code, found = run_store("stats")
    assert (code, found["holder"], found["chunks"]) == (0, "this process already", 14)
    assert set(found["contexts"]) == {"mail", "notes", "third"}  # still in the log only
    assert run_store("check")[1]["problems"] == []
    assert run_store("export", tmp_path / "copy")[0] == 0
    for action in (["gc"], ["forget", "mail"], ["forget", "--all"]):
        code, message = run_store(*action)
        assert code == 2
        assert "is in use by this process already. Stop it, or set" in message
    damage_chunk(kv, ROOT, A, 6)
    assert run_store("check", "--repair")[0] == 2
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


def test_holder_is_named_and_forgotten_when_it_dies(run_store, kv):
    command = [sys.executable, "-c", HOLD, str(kv)]
    with fork_server.Process(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout.readline() == "open\n"
        assert run_store("stats")[1]["holder"].startswith(f"process {holder.pid} (python")
        code, message = run_store("gc")
        assert code == 2
        assert f"is in use by process {holder.pid} (python" in message
        holder.kill()
    assert (kv / "lock").read_text().startswith(f"{holder.pid}\n")  # the holder could not clean up
    assert run_store("stats")[1]["holder"] is None
    assert run_store("gc")[0] == 0
    assert (kv / "lock").read_text() == ""


def test_chunks_written_behind_the_index_are_not_damage(run_store, kv, monkeypatch):
    """The holder evicted chunks and reused their space; its commit comes a moment later."""
    store = open_store(kv)
    store.reader.drop_damaged(store.tree.get(chain(ROOT, A)[6].key))
    store.reader.drop_damaged(store.tree.get(chain(ROOT, B)[4].key))
    save(store, np.arange(3000, 3032, dtype=np.int32))
    commit = store._writer.commit
    store._writer.commit = lambda: None
    store._residency.disk.release_early()  # as if it had no other space
    store.flush()
    store._writer.commit = commit
    monkeypatch.setattr(checking, "_RECHECK_S", 0)
    assert len(run_store("check")[1]["problems"]) == 2
    monkeypatch.undo()
    later = threading.Timer(0.3, commit)
    later.start()
    assert run_store("check")[1]["problems"] == []
    later.join()
    store.close()


# -- forget -------------------------------------------------------------------------------------


def test_forgotten_context_is_gone_from_the_disk(run_store, kv):
    only_mail, shared = chain(ROOT, A)[2:], chain(ROOT, A)[:2]
    code, found = run_store("forget", "mail")
    assert (code, found["n_contexts"], found["n_chunks"]) == (0, 1, 5)
    assert found["freed_bytes"] > 0
    left = on_disk(kv)
    for wanted in only_mail:
        assert payload(GEOM, wanted)[128:] not in left
        assert wanted.tokens not in left
        assert wanted.key not in left
    assert all(payload(GEOM, wanted) in left for wanted in shared)
    assert n_loaded(kv, ROOT, B) == len(B)
    assert run_store("stats")[1]["contexts"] == ["notes"]


def test_everything_can_be_forgotten(run_store, kv):
    (kv / "index.sqlite.unusable").write_bytes(A.tobytes())
    code, found = run_store("forget", "--all")
    assert (code, found["n_contexts"], found["n_chunks"]) == (0, 2, 12)
    assert run_store("stats")[1]["chunks"] == 0
    assert (kv / "chunks.slab").stat().st_size == PAGE
    left = on_disk(kv)
    for root, tokens in ((ROOT, A), (ROOT, B), (OTHER_MODEL, C)):
        for wanted in chain(root, tokens):
            assert payload(GEOM, wanted)[128:] not in left
            assert wanted.tokens not in left


def test_unknown_context_changes_nothing(run_store, kv):
    before = files(kv)
    code, message = run_store("forget", "mail", "male")
    assert code == 2
    assert "no such context: 'male'; nothing was changed. `llmaas store stats`" in message
    assert run_store("check")[1]["chunks"] == 12
    assert files(kv)["chunks.slab"] == before["chunks.slab"]


@pytest.mark.parametrize("args", [[], ["mail", "--all"]])
def test_forget_wants_names_or_all(run_store, args):
    with pytest.raises(SystemExit) as caught:
        run_store("forget", *args)
    assert caught.value.code == 2


# -- gc -----------------------------------------------------------------------------------------


def test_gc_drops_what_nobody_can_reach_and_gives_space_back(run_store, kv):
    # three more chunks follow it
    edit(kv, ("DELETE FROM chunks WHERE key = ?", (chain(ROOT, A)[3].key,)))
    edit(kv, ("UPDATE chunks SET used = 100 WHERE key = ?", (chain(ROOT, A)[6].key,)))
    damage_chunk(kv, OTHER_MODEL, C, 1)
    with (kv / "chunks.slab").open("ab") as file:
        file.write(b"x" * (64 * PAGE))  # from a larger budget, or from a flush that was killed
    (kv / "index.sqlite.unusable").write_bytes(b"x" * 50_000)
    code, found = run_store("gc")
    assert (code, found["n_chunks"]) == (0, 4)
    assert found["freed_bytes"] >= 64 * PAGE
    assert not (kv / "index.sqlite.unusable").exists()
    assert run_store("check")[1] == {
        "store": str(kv), "holder": None, "chunks": 7, "problems": [], "repaired": False,
    }  # fmt: skip
    assert (kv / "chunks.slab").stat().st_size <= 13 * PAGE
    assert (n_loaded(kv, ROOT, A), n_loaded(kv, ROOT, B)) == (48, len(B))
    assert run_store("gc")[1] == {"n_contexts": 0, "n_chunks": 0, "freed_bytes": 0}


# -- export -------------------------------------------------------------------------------------


def test_export_of_everything(run_store, kv, tmp_path):
    before = files(kv)
    code, found = run_store("export", tmp_path / "copy")
    assert (code, found["n_contexts"], found["n_chunks"], found["skipped"]) == (0, 2, 12, 0)
    assert files(kv) == before
    copy = tmp_path / "copy"
    assert stat.S_IMODE(copy.stat().st_mode) == 0o700
    assert run_store("check", store=copy)[0] == 0
    theirs, ours = run_store("stats", store=copy)[1], run_store("stats")[1]
    for key in ("contexts", "chunks", "chunk_bytes", "models", "oldest", "newest"):
        assert theirs[key] == ours[key]
    for root, tokens in ((ROOT, A), (ROOT, B), (OTHER_MODEL, C)):
        assert n_loaded(copy, root, tokens) == len(tokens)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "kv"]


def test_export_of_one_context_holds_nothing_else(run_store, kv, tmp_path):
    code, found = run_store("export", tmp_path / "copy", "--context", "notes")
    assert (code, found["n_contexts"], found["n_chunks"]) == (0, 1, 5)
    copy = tmp_path / "copy"
    assert run_store("stats", store=copy)[1]["contexts"] == ["notes"]
    assert (n_loaded(copy, ROOT, B), n_loaded(copy, ROOT, A)) == (len(B), 32)
    left = on_disk(copy)
    assert all(wanted.tokens not in left for wanted in chain(ROOT, A)[2:])


def test_export_leaves_damage_behind_and_says_so(run_store, kv, tmp_path):
    damage_chunk(kv, ROOT, A, 3)
    code, found = run_store("export", tmp_path / "copy")
    assert (code, found["n_chunks"], found["skipped"]) == (1, 8, 4)
    assert run_store("check", store=tmp_path / "copy")[0] == 0
    assert n_loaded(tmp_path / "copy", ROOT, A) == 48
    assert set(run_store("stats", store=tmp_path / "copy")[1]["contexts"]) == {"mail", "notes"}


def test_export_overwrites_nothing(run_store, kv, tmp_path):
    (tmp_path / "there").mkdir()
    for target in (tmp_path / "there", kv, kv / "lock"):
        code, message = run_store("export", target)
        assert code == 2
        assert f"{target} already exists; nothing was written" in message
    code, message = run_store("export", tmp_path / "missing/copy")
    assert code == 2
    assert "cannot write" in message
    code, message = run_store("export", tmp_path / "copy", "--context", "male")
    assert code == 2
    assert "no such context: 'male'" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kv", "there"]
