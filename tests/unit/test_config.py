"""Every source of configuration, and their precedence."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel, ByteSize, ConfigDict

from llmaas_hooks import ConfigError
from llmaas_plugins import load_config
from llmaas_plugins.config import PluginTable, validated
from llmaas_plugins.deadlines.config import DeadlinesConfig

FILE = """
on_error = "raise"
[service]
max_queue = 5
[plugins.kv]
codec = "int8"
ram = "2 MiB"
[plugins.knn]
enabled = false
k = 8
"""
KV = "LLMAAS_PLUGINS__KV__"


@pytest.fixture(autouse=True)
def _no_file_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    codec: Literal["int8", "lossless"] = "int8"
    ram: ByteSize = ByteSize(1)
    store: Path = Path()


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "llmaas.toml"
    path.write_text(FILE)
    return path


def test_defaults():
    config = load_config(environ={})
    assert (config.on_error, dict(config.plugins), config.enabled()) == ("log", {}, [])
    assert config.service.max_queue == 32
    assert config.origins == {}


@pytest.mark.parametrize("kind", [str, Path])
def test_file(path, kind):
    config = load_config(kind(path), {})
    assert config.on_error == "raise"
    assert config.enabled() == ["kv"]
    assert config.plugins["kv"].values == {"codec": "int8", "ram": "2 MiB"}
    assert config.plugins["kv"].origins == {"codec": "llmaas.toml", "ram": "llmaas.toml"}
    assert config.plugins["knn"].values == {"k": 8}
    assert config.origins == {"on_error": "llmaas.toml", "service.max_queue": "llmaas.toml"}
    settings = validated("kv", Settings, config.plugins["kv"])
    assert settings.ram == 2 << 20


def test_file_from_the_environment(path):
    assert load_config(environ={"LLMAAS_CONFIG": str(path)}).on_error == "raise"
    assert load_config(environ={"LLMAAS_CONFIG": ""}).on_error == "log"


def test_named_file_wins_over_the_environments(path):
    assert load_config(path, {"LLMAAS_CONFIG": "/nowhere"}).on_error == "raise"


def test_the_process_environment_is_the_default(path, monkeypatch):
    monkeypatch.setenv("LLMAAS_CONFIG", str(path))
    assert load_config().enabled() == ["kv"]


def test_code(path):
    config = load_config({"plugins": {"kv": {"codec": "int8"}}}, {"LLMAAS_CONFIG": str(path)})
    assert config.on_error == "log"  # the file is not read
    assert config.plugins["kv"].origins == {"codec": "code"}


@pytest.mark.parametrize(
    ("value", "enabled"),
    [
        (None, ["kv"]),
        ("", []),
        ("  ", []),
        ("knn", ["knn"]),
        (" knn , kv,", ["knn", "kv"]),
        ("other", ["other"]),
    ],
)
def test_llmaas_plugins_has_three_states(path, value, enabled):
    environ = {} if value is None else {"LLMAAS_PLUGINS": value}
    config = load_config(path, environ)
    assert sorted(config.enabled()) == enabled
    assert config.plugins["kv"].values == {"codec": "int8", "ram": "2 MiB"}  # plugin on or off


def test_environment_wins_over_file(path):
    config = load_config(path, {f"{KV}CODEC": "lossless"})
    assert config.plugins["kv"].values == {"codec": "lossless", "ram": "2 MiB"}
    assert config.plugins["kv"].origins == {"codec": "env", "ram": "llmaas.toml"}


def test_code_wins_over_environment():
    source = {"plugins": {"kv": {"codec": "int8"}}}
    environ = {f"{KV}CODEC": "lossless", f"{KV}RAM": "7", "LLMAAS_PLUGINS": ""}
    config = load_config(source, environ | {f"{KV}ENABLED": "false"})
    assert config.enabled() == ["kv"]
    assert config.plugins["kv"].values == {"codec": "int8", "ram": "7"}
    assert config.plugins["kv"].origins == {"codec": "code", "ram": "env"}


def test_a_key_alone_enables_nothing():
    assert load_config(environ={f"{KV}CODEC": "int8"}).enabled() == []
    both = {f"{KV}CODEC": "lossless", "LLMAAS_PLUGINS": "kv"}
    config = load_config(environ=both)
    assert config.enabled() == ["kv"]
    assert config.plugins["kv"].values == {"codec": "lossless"}


@pytest.mark.parametrize(("value", "enabled"), [("true", True), ("0", False), ("False", False)])
def test_enabled_by_variable(path, value, enabled):
    config = load_config(path, {f"{KV}ENABLED": value})
    assert config.plugins["kv"].enabled is enabled
    assert "enabled" not in config.plugins["kv"].values


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"plugin": {}}, "unknown key 'plugin'. Did you mean 'plugins'?"),
        ({"kv_chunks": {}}, "unknown key 'kv_chunks'. Did you mean 'plugins.kv_chunks'?"),
        ({"on_error": "explode"}, "code: on_error: "),
        ({"service": {"max_queu": 1}}, "unknown key 'service.max_queu'. Did you mean 'max_queue'?"),
        ({"service": {"max_queue": 0}}, "service.max_queue: expected at least 1, found 0"),
        ({"plugins": {"kv": 3}}, "plugins.kv: expected a table, found 3"),
        ({"plugins": ["kv"]}, "plugins: expected a table, found ['kv']"),
        ({"service": 3}, "service: expected a table, found 3"),
        ({"service": {"state_dir": 3}}, "service.state_dir: expected a path, found 3"),
        ({"service": {"allowed_hosts": "a"}}, "allowed_hosts: expected a list, found 'a'"),
        ({"cloud": {"model": 3}}, "cloud.model: expected a text, found 3"),
        ({"cloud": {"model": "large"}}, "code: cloud.base_url: expected a value"),
        ({"cloud": {"keyenv": "KEY"}}, "unknown key 'cloud.keyenv'. Did you mean 'key_env'?"),
        (
            {"cloud": {"apps": {"mail": {"kep": True}}}},
            "unknown key 'cloud.apps.mail.kep'. Did you mean 'keep'? Known: keep, private",
        ),
        ({"cloud": {"timeout_s": 0}}, "cloud.timeout_s: expected more than 0.0, found 0"),
        (
            {"cloud": {"apps": {"mail": {"keep": True, "private": True}}}},
            "the cloud says nothing to a private app",
        ),
        ({"plugins": {"kv": {"enabled": "yes"}}}, "plugins.kv.enabled: expected true or false"),
    ],
)
def test_wrong_tables(source, message):
    with pytest.raises(ConfigError) as caught:
        load_config(source, {})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"LLMAAS_PLUGINS__KV": "x"},
            "LLMAAS_PLUGINS__KV: expected LLMAAS_PLUGINS__<PLUGIN>__<KEY>",
        ),
        ({f"{KV}ENABLED": "perhaps"}, "LLMAAS_PLUGINS__KV__ENABLED: expected true or false"),
        ({"LLMAAS_CONFIG": "/nowhere/llmaas.toml"}, "cannot read configuration /nowhere/llmaas"),
    ],
)
def test_wrong_variables(environ, message):
    with pytest.raises(ConfigError) as caught:
        load_config(environ=environ)
    assert message in str(caught.value)


def test_wrong_toml_names_the_line(tmp_path):
    path = tmp_path / "broken.toml"
    path.write_text("a = 1\nb =\n")
    with pytest.raises(ConfigError, match=r"broken\.toml is not valid TOML: .*line 2"):
        load_config(path, {})


@pytest.mark.parametrize("text", ["\xff", "\x00"])
def test_binary_file_is_a_config_error(tmp_path, text):
    path = tmp_path / "binary.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"binary\.toml"):
        load_config(path, {})


def test_wrong_file_value_names_the_file(path):
    path.write_text('on_error = "explode"')
    with pytest.raises(ConfigError, match=r"^llmaas\.toml: on_error: .*found 'explode'"):
        load_config(path, {})


def test_validated_unknown_key_is_suggested():
    table = PluginTable(True, {"codek": 1}, {"codek": "llmaas.toml"})
    with pytest.raises(ConfigError) as caught:
        validated("kv", Settings, table)
    assert str(caught.value) == (
        "plugins.kv (llmaas.toml): unknown key 'codek'. Did you mean 'codec'? "
        "Known: codec, ram, store"
    )


@pytest.mark.parametrize("origin", ["env", "code", "llmaas.toml"])
def test_validated_wrong_value_names_its_origin(origin):
    table = PluginTable(True, {"codec": "zip"}, {"codec": origin})
    with pytest.raises(ConfigError, match=rf"^plugins\.kv \({origin}\): codec: .*found 'zip'"):
        validated("kv", Settings, table)


def test_a_wrong_value_is_quoted_once_and_in_plain_words():
    table = PluginTable(True, {"ttft": "soon"}, {"ttft": "llmaas.toml"})
    with pytest.raises(ConfigError) as caught:
        validated("deadlines", DeadlinesConfig, table)
    assert str(caught.value).startswith("plugins.deadlines (llmaas.toml): ttft: expected a time")
    assert str(caught.value).count("soon") == 1
    with pytest.raises(ConfigError, match=r"service\.allowed_hosts: expected names like"):
        load_config({"service": {"allowed_hosts": ["a b"]}}, {})


def test_equal_configurations_are_equal(path):
    assert load_config(path, {}) == load_config(path, {})
    assert load_config(path, {}) != load_config(path, {"LLMAAS_PLUGINS": ""})


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("allowed_origins", "*"),
        ("allowed_origins", "https://example.org/"),
        ("allowed_origins", "example.org"),
        ("allowed_origins", "null"),
        ("allowed_hosts", "*"),
        ("allowed_hosts", "https://example.org"),
        ("allowed_hosts", "example.org:8000"),
        ("allowed_hosts", ""),
    ],
)
def test_names_that_no_browser_sends_are_refused(key, name):
    with pytest.raises(ConfigError, match=rf"service\.{key}: .*expected names like .*found"):
        load_config({"service": {key: [name]}}, {})


def test_names_of_the_service_and_of_pages():
    hosts = ["Box.example", "192.0.2.1", "2001:db8::1"]
    origins = ["HTTPS://Own.example:8443", "http://[::1]:3000", "chrome-extension://abc"]
    found = load_config({"service": {"allowed_hosts": hosts, "allowed_origins": origins}}, {})
    assert found.service.allowed_hosts == tuple(name.lower() for name in hosts)
    assert found.service.allowed_origins == tuple(name.lower() for name in origins)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", 'is empty, expected a path; "." is this folder'),
        ("a\0b", "expected a path without NUL, found 'a\\x00b'"),
    ],
)
def test_a_path_that_names_nothing_is_refused(value, message):
    with pytest.raises(ConfigError) as caught:
        load_config({"service": {"state_dir": value}}, {})
    assert str(caught.value).startswith("service.state_dir")
    assert str(caught.value).endswith(message)
    table = PluginTable(True, {"store": value}, {"store": "env"})
    with pytest.raises(ConfigError) as caught:
        validated("kv", Settings, table)
    assert str(caught.value).startswith("plugins.kv.store")
    assert str(caught.value).endswith(message)
    here = PluginTable(True, {"store": "."}, {})
    assert validated("kv", Settings, here).store == Path.cwd()


CLOUD = {"base_url": "https://api.example.org/v1/", "model": "large"}


def test_a_cloud():
    assert load_config({}, {}).cloud is None
    cloud = CLOUD | {"key_env": "KEY", "apps": {"mail": {"keep": True}}}
    config = load_config({"cloud": cloud}, {})
    assert config.cloud.base_url == "https://api.example.org/v1"
    assert (config.cloud.apps["mail"].keep, config.cloud.apps["mail"].private) == (True, False)
    assert config.origins["cloud.key_env"] == "code"


@pytest.mark.parametrize(
    "url",
    [
        "api.example.org/v1",
        "ftp://example.org",
        "https://",
        "https:///v1",
        "https://me:sesame@example.org/v1",
        "https://example.org/v1?key=sesame",
        "https://example.org/v1#sesame",
        "https://example.org/sesame v1",
        "https://example.org:0/sesame",
        "https://example.org:99999/sesame",
        "https://[sesame/v1",
        "https://bücher.example/sesame",
        "https://example.org/sesame\r\nX: 1",
    ],
)
def test_an_address_that_is_none_or_has_a_secret_is_not_quoted(url):
    with pytest.raises(ConfigError, match=r"cloud\.base_url: expected a URL") as caught:
        load_config({"cloud": CLOUD | {"base_url": url}}, {})
    assert "sesame" not in str(caught.value)


def test_a_key_in_place_of_its_variable_is_not_quoted():
    with pytest.raises(ConfigError, match="never the key itself") as caught:
        load_config({"cloud": CLOUD | {"key_env": "sk-sesame"}}, {})
    assert "sesame" not in str(caught.value)
