"""``llmaas store check``: damage is told and repaired."""

from __future__ import annotations

import os

import pytest
from damages import FOREIGN, LINKS, ODD, each, each_told, files
from kv_stores import ROOT, A, B, damage_chunk, edit, n_loaded, open_store, save

from llmaas_plugins.cli.main import main
from llmaas_plugins.kv_chunks.store.chunk_ids import chain
from llmaas_plugins.kv_chunks.store.extents import PAGE


def test_sound_store(run_store, kv):
    before = files(kv)
    code, found = run_store("check")
    assert (code, found["problems"], found["chunks"]) == (0, [], 12)
    assert files(kv) == before


def test_damaged_chunk_is_named_and_repaired(run_store, kv):
    damage_chunk(kv, ROOT, A, 3)
    key = chain(ROOT, A)[3].key.hex()[:12]
    code, found = run_store("check")
    assert (code, found["problems"]) == (1, [f"chunk {key}: its bytes are damaged"])
    code, found = run_store("check", "--repair")
    assert (code, found["repaired"]) == (0, True)
    assert run_store("check") == (0, found | {"problems": [], "repaired": False, "chunks": 8})
    assert n_loaded(kv, ROOT, A) == 48
    assert n_loaded(kv, ROOT, B) == len(B)
    assert run_store("stats")[1]["contexts"] == ["notes", "mail"]


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
def test_harm_is_told_and_repaired(run_store, kv, problem, statement):
    if statement is None:
        os.truncate(kv / "chunks.slab", 12 * PAGE + 2000)
        problem = "invalid rows"
    else:
        edit(kv, statement)
    code, found = run_store("check")
    assert code == 1
    assert any(problem in said for said in found["problems"])
    assert run_store("check", "--repair")[0] == 0
    assert run_store("check")[0] == 0
    store = open_store(kv)
    save(store, A, "mail")
    store.close()
    assert n_loaded(kv, ROOT, A) == len(A)


def test_trigger_in_the_index_is_never_run(run_store, kv):
    edit(kv, "CREATE TRIGGER t AFTER DELETE ON chunks BEGIN DELETE FROM contexts; END")
    assert run_store("check")[0] == 1
    assert run_store("stats")[0] == 2


@pytest.mark.parametrize("name", ["chunks.slab", "index.sqlite", "lock"])
@each_told({"is a symbolic link": LINKS, "is not a regular file": ODD})
def test_what_is_no_file_is_not_opened(run_store, kv, name, damage, message):
    damage(kv / name)
    before = files(kv, but=[name, "lock"])
    for action in ("stats", "check", "gc"):
        code, said = run_store(action)
        assert code == 2
        assert f"{name} {message}. Remove it, or set" in said
    assert files(kv, but=[name, "lock"]) == before


@pytest.mark.parametrize("name", ["chunks.slab", "index.sqlite"])
@each(FOREIGN)
def test_files_of_another_kind_are_told_and_repaired(run_store, kv, name, damage):
    damage(kv / name)
    before = files(kv, but=["index.sqlite-shm", "index.sqlite-wal"])
    assert run_store("check")[0] == 1
    assert files(kv, but=["index.sqlite-shm", "index.sqlite-wal"]) == before
    assert run_store("check", "--repair")[0] == 0
    assert run_store("check")[0] == 0


def test_text_names_the_next_step(kv, capsys):
    damage_chunk(kv, ROOT, A, 3)
    assert main(["store", "check", "--store", str(kv)]) == 1
    out = capsys.readouterr().out
    assert "12 chunks in" in out
    assert "1 problem" in out
    assert "`llmaas store check --repair` drops damaged data." in out
