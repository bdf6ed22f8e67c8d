"""A small store, written once for all tests that damage, open or change a copy of it."""

from __future__ import annotations

import shutil

import kv_stores
import pytest


@pytest.fixture(scope="session")
def original(tmp_path_factory):
    """Return a closed store that holds two contexts; tests only read it."""
    return kv_stores.write_store(tmp_path_factory.mktemp("original") / "kv")


@pytest.fixture
def kv(original, tmp_path):
    """Return a copy of the store."""
    return shutil.copytree(original, tmp_path / "kv")
