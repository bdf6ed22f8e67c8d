"""Whether this machine has the resources that plugins need, as doctor and startup report it."""

from __future__ import annotations

import contextlib
import re

from llmaas_plugins.cli.doctor.resources import resource_findings, say_problems
from llmaas_plugins.config import load_config
from llmaas_plugins.kv_chunks.store.disk_store import DiskStore
from llmaas_plugins.machine import resident_bytes


def test_what_this_machine_does_not_have(monkeypatch, tmp_path):
    for key, value in {
        "KV_CHUNKS__DISK_BUDGET": "1000000 TiB",
        "KV_CHUNKS__RAM_BUDGET": "1000000 GiB",
        "KV_CHUNKS__STORE": str(tmp_path / "kv"),
        "KNN_LM__STORE": str(tmp_path / "knn"),
        "FLASH_WEIGHTS__MEMORY_BUDGET": "1000000 GiB",
    }.items():
        monkeypatch.setenv(f"LLMAAS_PLUGINS__{key}", value)
    monkeypatch.setenv("LLMAAS_PLUGINS", "kv_chunks,knn_lm,flash_weights")
    config = load_config()
    found = {finding.name: finding for finding in resource_findings(config)}
    assert "do not fit on the disk of" in found["plugins.kv_chunks.disk_budget"].problem
    assert "but this process can have" in found["plugins.kv_chunks.ram_budget"].problem
    assert "there is no datastore in" in found["plugins.knn_lm.datastore"].problem
    assert "can have" in found["plugins.flash_weights.memory_budget"].problem
    assert all(finding.next_step for finding in found.values())
    assert list(tmp_path.iterdir()) == []


def test_a_ram_budget_that_the_memory_budget_does_not_leave(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("LLMAAS_PLUGINS", "kv_chunks,flash_weights")
    monkeypatch.setenv("LLMAAS_PLUGINS__KV_CHUNKS__STORE", str(tmp_path / "kv"))
    monkeypatch.setenv("LLMAAS_PLUGINS__KV_CHUNKS__DISK_BUDGET", "0")

    def told(ram_budget, memory_budget):
        caplog.clear()
        monkeypatch.setenv("LLMAAS_PLUGINS__KV_CHUNKS__RAM_BUDGET", ram_budget)
        monkeypatch.setenv("LLMAAS_PLUGINS__FLASH_WEIGHTS__MEMORY_BUDGET", memory_budget)
        say_problems(load_config())
        return caplog.messages

    n_mib = (resident_bytes() >> 20) + 300
    (line,) = told("1 GiB", f"{n_mib} MiB")
    given, process = map(
        int,
        re.fullmatch(r".*: contexts get (\d+) of the 1024 MiB,.* the (\d+) MiB.*", line).groups(),
    )
    assert given + process in (n_mib - 1, n_mib)
    assert line.endswith("lower it, or raise plugins.flash_weights.memory_budget")
    (line,) = told("1 MiB", "1 MiB")  # this process alone takes more
    assert "contexts get 0 of the 1 MiB" in line
    assert told("100 MiB", "2 GiB") == []
    monkeypatch.setenv("LLMAAS_PLUGINS", "kv_chunks")
    assert told("1 GiB", "700 MiB") == []


def test_a_store_that_another_app_holds(monkeypatch, tmp_path):
    monkeypatch.setenv("LLMAAS_PLUGINS", "kv_chunks")
    monkeypatch.setenv("LLMAAS_PLUGINS__KV_CHUNKS__STORE", str(tmp_path / "kv"))

    def found():
        findings = {finding.name: finding for finding in resource_findings(load_config())}
        return findings.get("KV store")

    with contextlib.closing(DiskStore(tmp_path / "kv", 1 << 20)):
        assert f"{tmp_path / 'kv'} is in use by " in found().problem
        assert "set plugins.kv_chunks.store to another directory" in found().next_step
        monkeypatch.setenv("LLMAAS_PLUGINS__KV_CHUNKS__DISK_BUDGET", "0")
        assert found() is None
        monkeypatch.delenv("LLMAAS_PLUGINS__KV_CHUNKS__DISK_BUDGET")
    assert found() is None
    (tmp_path / "kv" / "lock").unlink()
    (tmp_path / "kv" / "lock").mkdir()
    assert "lock is not a regular file" in found().problem


def test_an_app_that_starts_is_told_the_same(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("LLMAAS_PLUGINS", "knn_lm")
    monkeypatch.setenv("LLMAAS_PLUGINS__KNN_LM__STORE", str(tmp_path))
    say_problems(load_config())
    (line,) = caplog.messages
    assert line.startswith(f"plugins.knn_lm.datastore: there is no datastore in {tmp_path}")
    assert line.endswith("build one with `llmaas datastore build EXPORT --model GGUF`")
    monkeypatch.setenv(
        "LLMAAS_PLUGINS__KNN_LM__LEARN", "true"
    )  # learning creates the datastore later
    say_problems(load_config())
    assert len(caplog.messages) == 1


def test_a_datastore_that_is_damaged(monkeypatch, tmp_path):
    (tmp_path / "datastore.knn").write_bytes(b"no datastore")
    monkeypatch.setenv("LLMAAS_PLUGINS", "knn_lm")
    monkeypatch.setenv("LLMAAS_PLUGINS__KNN_LM__STORE", str(tmp_path))
    (finding,) = resource_findings(load_config())
    assert "cannot use datastore" in finding.problem
    assert "`llmaas datastore select`" in finding.next_step
