"""Digest cache of a user who has no home folder, as in some containers."""

from __future__ import annotations

import logging
import pwd

import pytest

from llmaas_hooks import FileStamp
from llmaas_plugins.files import digest_cache


@pytest.fixture
def homeless(monkeypatch):
    def no_user(uid):
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_user)
    digest_cache._tell.cache_clear()


def test_without_a_home_folder_digests_are_not_cached(homeless, caplog):
    stamp = FileStamp(1, 2, 3, 4, 5)
    with caplog.at_level(logging.WARNING, "llmaas"):
        digest_cache.keep(stamp, bytes(digest_cache.DIGEST_BYTES))
    assert "set XDG_CACHE_HOME or HOME" in caplog.text
    assert digest_cache.find(stamp) is None


def test_the_cache_of_a_user_without_a_home_folder_can_be_named(homeless, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    stamp, digest = FileStamp(1, 2, 3, 4, 5), bytes(range(digest_cache.DIGEST_BYTES))
    digest_cache.keep(stamp, digest)
    assert digest_cache.find(stamp) == digest
