"""The one parser of sizes, for settings of every plugin and options of every command."""

from __future__ import annotations

import shutil

import pytest
from pydantic import BaseModel, ByteSize

from llmaas_hooks import ConfigError
from llmaas_plugins import machine, sizes
from llmaas_plugins.cli.main import main
from llmaas_plugins.config import ServiceConfig, load_config, validated
from llmaas_plugins.flash_weights.config import FlashWeightsConfig
from llmaas_plugins.kv_chunks.config import KVChunksConfig
from llmaas_plugins.sizes import memory_bytes, size_bytes

RUBBISH = [
    *("3GiBx", "60%%", "1e3 GiB", "nan", "inf", "-1", "-3 GiB", "+3 GiB", "", " ", "GiB", "3 ib"),
    *("1_000", "\u0663 GiB", "3 GiB 4", "0x10", "3,5 GiB", "1.2.3 GiB", "9" * 5000, "9" * 19),
    *("0%", "101%", "-60%", "%", "60 % of it", "3 bit", True, 3.5, float("nan"), [], {}, -1),
]


@pytest.mark.parametrize(
    ("value", "n_bytes"),
    [
        ("3 GiB", 3 << 30),
        ("3gib", 3 << 30),
        (" 1.5 MiB ", 3 << 19),
        ("3 GB", 3 * 10**9),
        ("3k", 3000),
        ("12", 12),
        ("12 B", 12),
        ("0", 0),
        (12, 12),
        ("2 PiB", 2 << 50),
    ],
)
def test_sizes(value, n_bytes):
    assert size_bytes(value) == memory_bytes(value) == n_bytes


@pytest.mark.parametrize("value", RUBBISH, ids=lambda value: repr(value)[:20])
def test_rubbish_is_none(value):
    for parse in (size_bytes, memory_bytes):
        with pytest.raises(ValueError, match="expected a size such as 3 GiB"):
            parse(value)


@pytest.mark.parametrize("value", RUBBISH, ids=lambda value: repr(value)[:20])
@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("flash_weights", "memory_budget"),
        ("flash_weights", "arena"),
        ("flash_weights", "read_size"),
        ("flash_weights", "read_gap"),
        ("kv_chunks", "ram_budget"),
        ("kv_chunks", "disk_budget"),
        ("kv_chunks", "write_budget"),
    ],
)
def test_every_setting_refuses_rubbish_in_one_line(name, key, value):
    model = {"flash_weights": FlashWeightsConfig, "kv_chunks": KVChunksConfig}[name]
    table = load_config({"plugins": {name: {key: value}}}, {}).plugins[name]
    with pytest.raises(ConfigError) as caught:
        validated(name, model, table)
    assert str(caught.value).startswith(f"plugins.{name} (code): {key}: expected a size")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [0, 3, "600", "1023 KiB"])
@pytest.mark.parametrize(
    ("model", "key"),
    [
        (FlashWeightsConfig, "memory_budget"),
        (KVChunksConfig, "ram_budget"),
    ],
)
def test_a_memory_budget_without_its_unit_is_refused(model, key, value):
    table = load_config({"plugins": {"some": {key: value}}}, {}).plugins["some"]
    with pytest.raises(ConfigError, match=r"at least 1 MiB; write the unit, as in 600 MiB, found"):
        validated("some", model, table)
    assert getattr(model(**{key: "1 MiB"}), key) == 1 << 20


def test_options_and_the_service_do_too(capsys):
    with pytest.raises(ConfigError, match=r"max_body_bytes: expected a size"):
        load_config({"service": {"max_body_bytes": "1 MiBB"}}, {})
    with pytest.raises(SystemExit):
        main(["flash", "plan", "none.gguf", "--memory-budget", "3GiBx"])
    assert "expected a size such as 3 GiB, or a share such as 60%, found '3GiBx'" in (
        capsys.readouterr().err
    )


def test_every_size_of_a_setting_is_parsed_here():
    """A bare ``ByteSize`` takes 60%% for 60 bytes."""
    for model in (FlashWeightsConfig, KVChunksConfig, ServiceConfig):
        for name, field in model.model_fields.items():
            if "ByteSize" in repr(field.annotation):
                assert any(
                    getattr(one, "func", None) is not None and one.func.__module__ == sizes.__name__
                    for one in field.metadata
                ), name


def test_a_share_is_of_the_smaller_of_machine_and_cgroup(monkeypatch):
    monkeypatch.setattr(machine, "memory_limit_bytes", lambda: 1000)
    assert memory_bytes("60%") == 600
    monkeypatch.setattr(machine, "memory_limit_bytes", lambda: None)
    assert memory_bytes("12.5 %") == machine._meminfo("MemTotal") // 8
    monkeypatch.setattr(machine, "memory_limit_bytes", lambda: 1 << 59)
    assert memory_bytes("100%") == machine._meminfo("MemTotal")


def test_a_share_of_the_disk_is_of_the_file_system(tmp_path):
    config = KVChunksConfig(store=tmp_path / "not" / "yet", disk_budget="25%", ram_budget="1%")
    assert config.disk_budget == shutil.disk_usage(tmp_path).total // 4
    assert config.ram_budget == machine.total_bytes() // 100
    assert KVChunksConfig(disk_budget="50%").disk_budget > 0


def test_a_missing_size():
    class Table(BaseModel):
        needed: sizes.Size
        spare: sizes.OptionalSize = None

    assert Table(needed=1).spare is None
    assert Table.model_fields["spare"].annotation == ByteSize | None
    with pytest.raises(ValueError, match="needed"):
        Table(needed=None)


def group(path, **files):
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (path / name.replace("__", ".")).write_text(f"{content}\n")


@pytest.mark.parametrize("is_v2", [False, True])
def test_the_smallest_limit_of_nested_groups(tmp_path, is_v2):
    line = "0::/a/b/c" if is_v2 else "4:cpu,memory:/a/b/c"
    group(tmp_path / "proc/self", cgroup=f"1:name=systemd:/x\n{line}")
    mount = tmp_path / ("sys/fs/cgroup" if is_v2 else "sys/fs/cgroup/memory")
    name = "memory__max" if is_v2 else "memory__limit_in_bytes"
    group(mount / "a/b/c", **{name: "max" if is_v2 else (1 << 63) - 4096})
    assert machine.memory_limit_bytes(tmp_path) is None
    group(mount, **{name: 900})
    group(mount / "a/b", **{name: 700})
    group(mount / "a", **{name: 500})
    assert machine.memory_limit_bytes(tmp_path) == 500
    group(mount / "a/b/c", memory__high=400)  # the kernel slows a process beyond it to a crawl
    assert machine.memory_limit_bytes(tmp_path) == (400 if is_v2 else 500)


@pytest.mark.parametrize("is_v2", [False, True])
def test_what_others_in_the_group_have_is_not_left(tmp_path, is_v2):
    usage = "memory__current" if is_v2 else "memory__usage_in_bytes"
    prefix = "" if is_v2 else "total_"
    stat = f"{prefix}inactive_file 30\n{prefix}active_file 20\nanon 7"
    group(tmp_path, **{usage: 200, "memory__stat": stat})
    assert machine._Group(tmp_path, is_v2).used() == 150
