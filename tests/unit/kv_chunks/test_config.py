"""Table ``[plugins.kv_chunks]``: accepted sizes, and errors that name the next step."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmaas_hooks import ConfigError
from llmaas_plugins.config import load_config, validated
from llmaas_plugins.kv_chunks.config import KVChunksConfig

MiB = 1 << 20


def configured(table, environ=None):
    config = load_config({"plugins": {"kv_chunks": table}}, environ or {})
    return validated("kv_chunks", KVChunksConfig, config.plugins["kv_chunks"])


def test_defaults():
    config = configured({})
    assert (config.codec, config.ram_bytes, config.disk_budget) == (
        "tolerance",
        256 * MiB,
        4096 * MiB,
    )
    assert (config.levels, config.ratio_global, config.eviction) == (
        (8, 6, 5, 4, 3, 2),
        0.5,
        "lru",
    )
    assert config.write_budget is None
    assert config.store == Path("~/.cache/llmaas/kv")


@pytest.mark.parametrize(
    ("written", "n_bytes"),
    [("256 MiB", 256 * MiB), ("1.5GiB", 1536 * MiB), ("2 MB", 2_000_000), (MiB, MiB)],
)
def test_sizes(written, n_bytes):
    config = configured({"ram_budget": written, "disk_budget": written})
    assert config.ram_budget == config.disk_budget == n_bytes


def test_disk_may_be_switched_off():
    assert configured({"disk_budget": 0}).disk_budget == 0
    assert configured({"disk_budget": "0 MiB"}).disk_budget == 0


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"ram_budget": "1023 KiB"}, "ram_budget: expected at least 1 MiB"),
        ({"ram_budget": "lots"}, "ram_budget: .*found 'lots'"),
        ({"ram_budget": "5 parsecs"}, "ram_budget: .*found '5 parsecs'"),
        ({"disk_budget": -1}, "disk_budget: .*found -1"),
        ({"codec": "int4"}, "codec: .*'tolerance', 'int8' or 'lossless'.*found 'int4'"),
        (
            {"levels": [2, 4, 8]},
            r"levels: .*must be in descending order, as in \[8, 4, 2\]; found \[2, 4, 8\]",
        ),
        ({"levels": [4, 4]}, "levels: .*must be in descending order"),
        ({"levels": []}, "levels: .*at least 1 item"),
        ({"levels": [16, 8]}, "levels.*expected at most 8"),
        ({"ratio_global": 0}, "ratio_global: .*expected more than 0"),
        ({"ratio_global": 1.5}, "ratio_global: .*expected at most 1"),
        ({"eviction": "fifo"}, "eviction: .*'lctru' or 'lru'"),
        ({"write_budget": -1}, "write_budget: .*found -1"),
        ({"parked_tokens": (1 << 32) - 512}, "parked_tokens: .*expected at most 16777216"),
        ({"store": 7}, "store: .*found 7"),
    ],
)
def test_wrong_values_name_the_key_and_what_was_found(table, message):
    with pytest.raises(ConfigError, match=r"plugins\.kv_chunks \(code\): " + message):
        configured(table)


def test_unknown_key_suggests_the_known_one():
    with pytest.raises(ConfigError, match=r"unknown key 'ram_buget'.*'ram_budget'.*Known: codec, "):
        configured({"ram_buget": "1 GiB"})


def test_every_setting_may_come_from_the_environment():
    environ = {
        "LLMAAS_PLUGINS__KV_CHUNKS__CODEC": "lossless",
        "LLMAAS_PLUGINS__KV_CHUNKS__RAM_BUDGET": "2 MiB",
        "LLMAAS_PLUGINS__KV_CHUNKS__DISK_BUDGET": "0",
        "LLMAAS_PLUGINS__KV_CHUNKS__STORE": "/elsewhere",
        "LLMAAS_PLUGINS__KV_CHUNKS__LEVELS": "4,2,1",
    }
    config = configured({}, environ)
    assert config == KVChunksConfig(
        codec="lossless",
        ram_budget=2 * MiB,
        disk_budget=0,
        store="/elsewhere",
        levels=(4, 2, 1),
    )
    assert configured({"codec": "int8"}, environ).codec == "int8"  # code wins


def test_settings_cannot_be_changed_afterwards():
    with pytest.raises(ValueError, match="frozen"):
        configured({}).codec = "lossless"


def test_every_setting_is_described():
    assert all(field.description for field in KVChunksConfig.model_fields.values())
