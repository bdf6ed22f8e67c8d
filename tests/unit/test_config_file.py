"""Default configuration files: which one is used, when it is refused, and the messages."""

from __future__ import annotations

import logging
import os

import pytest

import llmaas_plugins
from llmaas_hooks import ConfigError
from llmaas_plugins import config_file, load_config
from llmaas_plugins.config import PluginTable, validated
from llmaas_plugins.kv_chunks.config import KVChunksConfig

HERE, OWN = "[service]\nmax_queue = 3\n", "[service]\nmax_queue = 4\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Change to a folder without any file; a home folder lies beside it."""
    config_file._say.cache_clear()
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    return tmp_path / "folder"


@pytest.fixture
def environ(tmp_path):
    own = tmp_path / "home" / ".config" / "llmaas" / "llmaas.toml"
    own.parent.mkdir(parents=True)
    own.write_text(OWN)
    return {"HOME": str(tmp_path / "home")}


def n_queue(source=None, **environ):
    return load_config(source, environ).service.max_queue


def test_precedence(folder, environ, tmp_path):
    named, by_variable = tmp_path / "named.toml", tmp_path / "variable.toml"
    named.write_text("[service]\nmax_queue = 1\n")
    by_variable.write_text("[service]\nmax_queue = 2\n")
    assert n_queue(**environ) == 4
    (folder / "llmaas.toml").write_text(HERE)
    assert n_queue(**environ) == 3
    assert n_queue(**environ, LLMAAS_CONFIG=str(by_variable)) == 2
    assert n_queue(named, **environ, LLMAAS_CONFIG=str(by_variable)) == 1
    assert n_queue({}, **environ) == 32
    assert n_queue(**environ, LLMAAS_CONFIG="") == 32


def test_a_byte_order_mark_and_crlf_are_no_mistake(tmp_path):
    path = tmp_path / "windows.toml"
    path.write_bytes(b"\xef\xbb\xbf[service]\r\nmax_queue = 7\r\n")
    assert n_queue(path) == 7


def test_the_users_own_file_is_where_xdg_says(folder, environ, tmp_path):
    (tmp_path / "xdg" / "llmaas").mkdir(parents=True)
    (tmp_path / "xdg" / "llmaas" / "llmaas.toml").write_text(HERE)
    assert n_queue(**environ, XDG_CONFIG_HOME=str(tmp_path / "xdg")) == 3
    # the specification ignores relative paths
    assert n_queue(**environ, XDG_CONFIG_HOME="../xdg") == 4
    assert n_queue() == 32


def test_what_is_found_is_said_once(folder, environ, caplog):
    (folder / "llmaas.toml").write_text(HERE)
    config = load_config(environ=environ)
    load_config(environ=environ)
    assert config.file == folder / "llmaas.toml"
    assert caplog.messages == [f"settings from {folder / 'llmaas.toml'}"]
    assert load_config(folder / "llmaas.toml", environ).service.max_queue == 3
    assert len(caplog.messages) == 1


def test_activation_finds_it(folder, monkeypatch, dist_plugins):
    monkeypatch.delenv("LLMAAS_CONFIG")
    (folder / "llmaas.toml").write_text("[plugins.recorder]\n")
    with llmaas_plugins.activate() as suite:
        assert suite.config.enabled() == ["recorder"]
    with llmaas_plugins.activate({}) as suite:
        assert suite.config.enabled() == []


def test_a_file_that_everybody_can_write_is_refused(folder, environ):
    path = folder / "llmaas.toml"
    path.write_text(HERE)
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="every user can write it") as caught:
        load_config(environ=environ)
    assert f"chmod o-w {path}" in str(caught.value)
    assert n_queue(path, **environ) == 3  # named explicitly
    assert n_queue(**environ, LLMAAS_CONFIG=str(path)) == 3
    path.chmod(0o664)
    assert n_queue(**environ) == 3


def test_a_file_of_another_user_is_refused(folder, environ, monkeypatch):
    path = folder / "llmaas.toml"
    path.write_text(HERE)
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if owner == 0:
        assert n_queue(**environ) == 3
        os.chown(path, 4711, -1)
        owner = 4711
    with pytest.raises(ConfigError, match=f"belongs to user {owner}, expected"):
        load_config(environ=environ)


def test_a_link_of_another_user_is_refused(folder, environ):
    if os.geteuid() != 0:
        pytest.skip("only root can make such a link")
    (folder / "mine.toml").write_text(HERE)
    (folder / "llmaas.toml").symlink_to(folder / "mine.toml")
    assert n_queue(**environ) == 3
    os.lchown(folder / "llmaas.toml", 4711, -1)
    with pytest.raises(ConfigError, match="belongs to user 4711"):
        load_config(environ=environ)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.mkdir(), "cannot read configuration .*Is a directory"),
        (os.mkfifo, "is not a regular file"),  # opening it would wait for a writer
        (lambda path: path.symlink_to("nowhere"), "cannot read configuration .*No such file"),
        (lambda path: path.write_bytes(b"a = 1 #" + b"x" * (1 << 20)), "more than 1,048,576 bytes"),
        (lambda path: path.write_text("a = " + "[" * 100_000), "is not valid TOML"),
        (lambda path: path.write_text("[plugins\n"), "is not valid TOML: .*line 1"),
        (lambda path: path.write_bytes(b"a = '\xe9'"), "is not valid TOML"),
    ],
)
def test_what_is_found_and_unusable_is_an_error(folder, environ, make, message):
    make(folder / "llmaas.toml")
    with pytest.raises(ConfigError, match=message):
        load_config(environ=environ)


@pytest.mark.parametrize("name", ["~nobody-of-this-name/llmaas.toml", "a\0b", "/dev/null/x", "."])
def test_names_that_cannot_be(folder, name):
    with pytest.raises(ConfigError, match="cannot read configuration"):
        load_config(name, {})


def test_a_folder_that_is_gone(folder, environ):
    folder.rmdir()
    assert n_queue(**environ) == 4


KV = "LLMAAS_PLUGINS__KV_CHUNKS__"


@pytest.mark.parametrize(
    ("environ", "lines"),
    [
        (
            {f"{KV}CODEC": "int8", f"{KV}STORE": "x"},
            [
                f"{KV}CODEC, {KV}STORE has no effect: kv_chunks is off. "
                "LLMAAS_PLUGINS=kv_chunks enables it."
            ],
        ),
        (
            {"LLMAAS_PLUGINS__KV_CHUNK__CODEC": "int8"},
            [
                "LLMAAS_PLUGINS__KV_CHUNK__CODEC has no effect: no plugin 'kv_chunk' is installed. "
                "Did you mean 'kv_chunks'? Installed: deadlines, elastic, flash_weights, knn_lm, "
                "kv_chunks, short_prompts."
            ],
        ),
        ({f"{KV}CODEC": "int8", f"{KV}ENABLED": "true"}, []),
        ({f"{KV}CODEC": "int8", f"{KV}ENABLED": "false"}, []),  # intended by the user
        ({f"{KV}CODEC": "int8", "LLMAAS_PLUGINS": "kv_chunks"}, []),
    ],
)
def test_variables_without_effect(folder, environ, lines):
    assert list(load_config(environ=environ).without_effect()) == lines


def test_a_file_that_enables_the_plugin_gives_variables_effect(folder):
    (folder / "llmaas.toml").write_text("[plugins.kv_chunks]\n")
    config = load_config(environ={f"{KV}CODEC": "int8"})
    assert (config.enabled(), list(config.without_effect())) == (["kv_chunks"], [])


@pytest.mark.parametrize(
    ("source", "environ", "is_said"),
    [
        (None, {}, True),
        (None, {f"{KV}CODEC": "int8"}, True),
        (None, {"LLMAAS_PLUGINS": ""}, False),
        (None, {"LLMAAS_PLUGINS": "kv_chunks"}, False),
        ({}, {}, False),
    ],
)
def test_nothing_enabled_is_said_unless_it_is_meant(folder, source, environ, is_said):
    line = load_config(source, environ).nothing_enabled()
    assert (line is not None) is is_said


def test_activation_says_both(folder, monkeypatch, caplog):
    monkeypatch.setenv(f"{KV}CODEC", "int8")
    caplog.set_level(logging.WARNING, "llmaas")
    with llmaas_plugins.activate():
        pass
    no_effect, nothing = caplog.messages
    assert no_effect.startswith(f"{KV}CODEC has no effect")
    assert nothing.startswith("no plugin is enabled")


@pytest.mark.parametrize(
    ("environ", "enabled"),
    [
        ({}, ["kv_chunks"]),
        ({f"{KV}CODEC": "int8"}, ["kv_chunks"]),
        ({"LLMAAS_PLUGINS__KV_CHUNK__CODEC": "int8"}, ["kv_chunks"]),
        ({f"{KV}ENABLED": "false"}, []),
        ({"LLMAAS_PLUGINS": ""}, []),
        ({"LLMAAS_PLUGINS": "knn_lm"}, ["knn_lm"]),
    ],
)
def test_the_default_of_a_service(folder, environ, enabled):
    config = load_config(environ=environ).with_default("kv_chunks")
    assert config.enabled() == enabled
    if f"{KV}CODEC" in environ:
        assert config.plugins["kv_chunks"].values == {"codec": "int8"}


def test_paths_stay_what_they_are_wherever_the_process_goes(folder, monkeypatch):
    table = PluginTable(True, {"store": "kv"}, {"store": "code"})
    settings = validated("kv_chunks", KVChunksConfig, table)
    service = load_config({"service": {"state_dir": "state"}}, {}).service
    monkeypatch.chdir("/")
    assert settings.store == folder / "kv"
    assert service.state_dir == folder / "state"
    assert service.key_file is None


def test_nobodys_home_is_refused_at_once(folder):
    with pytest.raises(
        ConfigError, match=r"service.state_dir: ~nobody-of-this-name/x is the home of no user"
    ):
        load_config({"service": {"state_dir": "~nobody-of-this-name/x"}}, {})
