"""Entry points are listed without an import and loaded by name."""

from __future__ import annotations

import sys

import pytest
from installing import install_plugin

from llmaas_hooks import PluginError, UnknownPluginError, discovery
from llmaas_hooks.discovery import installed_plugins, load_plugin, suggest


def test_listing_imports_nothing(monkeypatch, dist_plugins):
    monkeypatch.delitem(sys.modules, "llmaas_test_plugins")
    found = installed_plugins()
    assert {"recorder", "broken_import", "misspelled"} <= set(found)
    assert list(found) == sorted(found)
    assert found["recorder"].dist.version == "1.0"
    assert "llmaas_test_plugins" not in sys.modules


def test_load(dist_plugins):
    assert load_plugin("recorder") is dist_plugins.Recorder
    assert dist_plugins.events == []  # loaded, not constructed


def test_unknown_plugin_suggests_and_lists(dist_plugins):
    expected = r"unknown plugin 'recorde'\. Did you mean 'recorder'\? Installed: .*misspelled"
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


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("exits", r"SystemExit: usage: llmaas_test_exits FILE"),
        ("not_a_class", r"'llmaas_test_plugins:events' is a list, expected a plugin class"),
        ("without_config", r"is a class without `Config`, expected a plugin class"),
        ("twin", "installed by llmaas-test-plugins and llmaas-test-twins; uninstall all but one"),
    ],
)
def test_what_is_no_plugin_is_named(dist_plugins, name, problem):
    with pytest.raises(PluginError, match=f"plugin '{name}' failed in import: .*{problem}"):
        load_plugin(name)


def test_suggest():
    assert suggest("kv_chunk", ["knn_lm", "kv_chunks"]) == " Did you mean 'kv_chunks'?"
    assert suggest("x", []) == ""


def test_a_package_that_is_installed_meanwhile_is_found(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    assert "late" not in installed_plugins()
    install_plugin(tmp_path, "late", "")
    assert "late" in installed_plugins()


def test_metadata_is_read_once(monkeypatch):
    found = installed_plugins()
    monkeypatch.setattr(discovery, "entry_points", lambda **_: pytest.fail("it was read again"))
    assert installed_plugins() == found
