"""Entry points are listed without an import and loaded by name."""

from __future__ import annotations

import sys

import pytest

from llmaas_hooks import PluginError, UnknownPluginError
from llmaas_hooks.discovery import installed_plugins, load_plugin, suggest


def test_listing_imports_nothing(monkeypatch, dist_plugins):
    monkeypatch.delitem(sys.modules, "llmaas_test_plugins")
    found = installed_plugins()
    assert {"recorder", "broken_import", "misspelt"} <= set(found)
    assert list(found) == sorted(found)
    assert found["recorder"].dist.version == "1.0"
    assert "llmaas_test_plugins" not in sys.modules


def test_load(dist_plugins):
    assert load_plugin("recorder") is dist_plugins.Recorder
    assert dist_plugins.events == []  # loaded, not made


def test_unknown_plugin_suggests_and_lists(dist_plugins):
    expected = r"unknown plugin 'recorde'\. Did you mean 'recorder'\? Installed: .*misspelt"
    with pytest.raises(UnknownPluginError, match=expected) as caught:
        load_plugin("recorde")
    assert "llmaas plugins" in str(caught.value)
    assert isinstance(caught.value, LookupError)


def test_unknown_plugin_without_a_near_name(dist_plugins):
    with pytest.raises(UnknownPluginError) as caught:
        load_plugin("zzz")
    assert "Did you mean" not in str(caught.value)


def test_import_failure_names_the_plugin(dist_plugins):
    with pytest.raises(PluginError, match=r"'broken_import' failed in import") as caught:
        load_plugin("broken_import")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_suggest():
    assert suggest("kv_chunk", ["knn_lm", "kv_chunks"]) == " Did you mean 'kv_chunks'?"
    assert suggest("x", []) == ""
