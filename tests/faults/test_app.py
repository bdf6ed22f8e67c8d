"""Stores that cannot be opened: the app continues with vanilla llama.cpp and the files stay."""

from __future__ import annotations

import contextlib
import sqlite3

import numpy as np
import pytest

from llmaas_plugins import activate
from llmaas_plugins.kv_chunks.store.disk_store import DiskStore
from llmaas_plugins.kv_chunks.store.store_format import FORMAT

PROMPT = [1, *np.random.default_rng(5).integers(300, 4000, 60).tolist()]


def answer(make_llama):
    llama = make_llama(n_threads_batch=1)
    generator = llama.generate(PROMPT, temp=0.0)
    tokens = [next(generator) for _ in range(8)]
    generator.close()
    return tokens


def suite(directory, codec):
    return activate({"plugins": {"kv_chunks": {"codec": codec, "store": str(directory)}}})


def newer(kv, stack):
    with contextlib.closing(sqlite3.connect(kv / "index.sqlite")) as db:
        db.execute(f"PRAGMA user_version={FORMAT + 1}")


def linked(kv, stack):
    (kv / "chunks.slab").rename(kv.parent / "slab")
    (kv / "chunks.slab").symlink_to(kv.parent / "slab")


def in_use(kv, stack):
    stack.callback(DiskStore(kv, 1 << 30).close)


@pytest.mark.parametrize(
    ("refusal", "codec"), [(newer, "lossless"), (linked, "int8"), (in_use, "tolerance")]
)
def test_app_goes_on_without_its_store(make_llama, tmp_path, caplog, refusal, codec):
    vanilla = answer(make_llama)
    kv = tmp_path / "kv"
    with suite(kv, codec):
        assert answer(make_llama) == vanilla
    with contextlib.ExitStack() as stack:
        refusal(kv, stack)
        before = {path.name: path.read_bytes() for path in kv.iterdir()}
        with suite(kv, codec) as active:
            assert answer(make_llama) == vanilla
            assert active.status()["plugins"]["kv_chunks"]["store"] is None
        assert {path.name: path.read_bytes() for path in kv.iterdir()} == before
    assert "KV store" in caplog.text
