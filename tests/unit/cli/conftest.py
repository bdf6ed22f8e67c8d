"""A store of two models, and ``llmaas store`` on it."""

from __future__ import annotations

import json

import pytest
from commands import error_of
from kv_stores import (
    OTHER_MODEL,
    ROOT,
    A,
    B,
    C,
    open_store,
    save,
)

from llmaas_plugins.cli.main import main
from llmaas_plugins.kv_chunks.store.chunk_ids import chain


@pytest.fixture
def kv(tmp_path):
    store = open_store(tmp_path / "kv")
    for root in (ROOT, OTHER_MODEL):
        store.set_layout(root, '{"n_layer": 1}')
    save(store, A, "mail")
    save(store, B, "notes")
    save(store, C, root=OTHER_MODEL)
    store.touch(chain(ROOT, A))
    store.close()
    return tmp_path / "kv"


@pytest.fixture
def run_store(capsys, kv):
    """Return a function that runs an action on the store and returns its exit code and report."""

    def run(action, *args, store=kv):
        code = main(["store", action, "--json", "--store", str(store), *map(str, args)])
        captured = capsys.readouterr()
        if code == 2:
            return code, error_of(captured)
        return code, json.loads(captured.out)

    return run
