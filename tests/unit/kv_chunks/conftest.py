"""Stores: a small one, written once for all tests that change a copy of it, and empty ones."""

from __future__ import annotations

import shutil

import kv_stores
import pytest

from llmaas_plugins._native import Budget
from llmaas_plugins.kv_chunks.store.chunk_store import ChunkStore
from llmaas_plugins.kv_chunks.store.disk_store import DiskStore
from llmaas_plugins.kv_chunks.store.extents import PAGE


@pytest.fixture(scope="session")
def original(tmp_path_factory):
    """Return a closed store that holds two contexts; tests only read it."""
    return kv_stores.write_store(tmp_path_factory.mktemp("original") / "kv")


@pytest.fixture
def kv(original, tmp_path):
    """Return a copy of the store."""
    return shutil.copytree(original, tmp_path / "kv")


@pytest.fixture
def open_store(tmp_path):
    """Return a function that opens a store with a size in pages, closing the one before."""
    stores = []

    def opened(ram, disk=0, **options):
        if stores:
            stores.pop().close()
        tier = DiskStore(tmp_path / "kv", disk * PAGE) if disk else None
        stores.append(ChunkStore(Budget(ram * PAGE), tier, **options))
        return stores[-1]

    yield opened
    if stores:
        stores.pop().close()
