"""``llmaas doctor``: every problem has a next step, and none is a crash."""

from __future__ import annotations

import json
import os
import re
import sys
from types import SimpleNamespace

import llama_cpp
import pytest

from llmaas_plugins.activation import activate
from llmaas_plugins.cli.doctor import diagnosis
from llmaas_plugins.cli.main import main
from llmaas_plugins.machine import memory_limit_bytes, room


@pytest.fixture(autouse=True)
def native(monkeypatch):
    """Simulate a built C core, so that these tests do not need one."""
    fake = SimpleNamespace(kernels_name=lambda: "avx2")
    monkeypatch.setitem(sys.modules, "llmaas_plugins._native", fake)


@pytest.fixture
def examined(capsys, dist_plugins):
    def run(*args):
        code = main(["doctor", "--json", *args])
        report = json.loads(capsys.readouterr().out)
        found = {(row["section"], row["name"]): row for row in report["findings"]}
        assert len(found) == len(report["findings"])
        problems = [row for row in report["findings"] if row["problem"]]
        assert all(row["next_step"] for row in problems)
        assert (code, report["ok"]) == (int(bool(problems)), not problems)
        return code, found

    return run


def test_fine(examined):
    code, found = examined()
    assert code == 0
    assert found["versions", "CPU kernels"]["value"] == "avx2"
    assert found["versions", "llama-cpp-python"]["value"].startswith(llama_cpp.__version__)
    assert ("patches", "llama_cpp.llama:Llama.generate") in found
    assert found["configuration", "on_error"]["origin"] == "default"
    assert found["configuration", "file"]["value"] == "none"
    assert "LLMAAS_PLUGINS=kv_chunks" in found["configuration", "plugins"]["next_step"]
    assert found["configuration", "service.max_queue"]["value"] == 32


def test_origins(examined, tmp_path, monkeypatch):
    path = tmp_path / "my.toml"
    path.write_text(
        'on_error = "raise"\n[service]\nmax_queue = 7\n[plugins.recorder]\n'
        'level = 2\nstore = "/tmp"'
    )
    monkeypatch.setenv("LLMAAS_PLUGINS__RECORDER__BUDGET", "2 KiB")
    code, found = examined("--config", str(path))
    assert code == 0
    shown = {
        name: (row["value"], row["origin"])
        for (section, name), row in found.items()
        if section == "configuration"
    }
    assert shown["file"] == (str(path), None)
    assert shown["on_error"] == ("raise", "my.toml")
    assert shown["service.max_queue"] == (7, "my.toml")
    assert shown["service.max_new_tokens"] == (256, "default")
    assert shown["plugins.recorder.level"] == (2, "my.toml")
    assert shown["plugins.recorder.budget"] == (2048, "env")
    assert "MiB free" in found["machine", "plugins.recorder.store"]["value"]


def test_plugins_that_are_off_are_not_loaded(examined, tmp_path):
    path = tmp_path / "my.toml"
    path.write_text("[plugins.broken_import]\nenabled = false")
    code, found = examined("--config", str(path))
    assert (code, found["configuration", "plugins.broken_import"]["value"]) == (0, "off")


@pytest.mark.parametrize(
    ("variables", "name", "problem"),
    [
        ({"LLMAAS_PLUGINS": "recorde"}, "plugins.recorde", "Did you mean 'recorder'"),
        ({"LLMAAS_PLUGINS": "broken_import"}, "plugins.broken_import", "failed in import"),
        ({"LLMAAS_PLUGINS": "exits"}, "plugins.exits", "failed in import: SystemExit"),
        ({"LLMAAS_PLUGINS": "broken_config"}, "plugins.broken_config", "ZeroDivisionError"),
        ({"LLMAAS_PLUGINS": "broken_constructor"}, "plugins.broken_constructor", "no luck"),
        ({"LLMAAS_PLUGINS": "misspelled"}, "plugins.misspelled", "unknown hook 'llmaas_logit'"),
        ({"LLMAAS_PLUGINS": "twin"}, "plugins.twin", "uninstall all but one of them"),
        ({"LLMAAS_CONFIG": "/nowhere.toml"}, "llmaas.toml", "cannot read configuration"),
        (
            {"LLMAAS_PLUGINS": "recorder", "LLMAAS_PLUGINS__RECORDER__LEVEL": "0"},
            "plugins.recorder",
            "plugins.recorder (env): level",
        ),
    ],
)
def test_wrong_configuration(examined, monkeypatch, variables, name, problem):
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    code, found = examined()
    assert code == 1
    assert problem in found["configuration", name]["problem"]


def test_a_variable_without_effect(examined, monkeypatch):
    monkeypatch.setenv("LLMAAS_PLUGINS__RECORDEN__LEVEL", "2")
    code, found = examined()
    problem = found["configuration", "LLMAAS_PLUGINS__RECORDEN__LEVEL"]["problem"]
    assert (code, "no plugin 'recorden' is installed" in problem) == (1, True)


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("LLMAAS_PLUGIN", "Did you mean 'LLMAAS_PLUGINS'?"),
        ("LLMAAS_PLUGIN__KV_CHUNKS__CODEC", "Did you mean 'LLMAAS_PLUGINS'?"),
        ("LLMAAS_CONFG", "Did you mean 'LLMAAS_CONFIG'?"),
        ("LLMAAS_SERVICE__MAX_QUEUE", "there is no such variable. Known: LLMAAS_CONFIG, "),
    ],
)
def test_a_variable_that_nothing_reads(examined, monkeypatch, caplog, variable, hint):
    monkeypatch.setenv(variable, "2")
    code, found = examined()
    problem = found["configuration", variable]["problem"]
    assert code == 1
    assert problem.startswith(f"{variable} has no effect: ")
    assert hint in problem
    with activate():
        assert problem in caplog.messages


def test_variables_that_the_project_reads(examined, monkeypatch, tmp_path):
    for variable in ("LLMAAS_SOAK", "LLMAAS_BENCH_QUICK", "LLMAAS_DATA", "LLMAAS_FUZZ_SEED"):
        monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("LLMAAS_CONFIG", "")
    monkeypatch.setenv("LLMAAS_PLUGINS", "")
    assert examined()[0] == 0


def test_wrong_engine_version(examined, monkeypatch):
    monkeypatch.setattr(llama_cpp, "__version__", "0.2.1")
    code, found = examined()
    row = found["versions", "llama-cpp-python"]
    assert code == 1
    assert "0.2.1 is installed" in row["problem"]
    assert row["next_step"] == "pip install llama-cpp-python==0.3.36"


def test_drift(examined, monkeypatch):
    monkeypatch.setattr(llama_cpp.llama_cpp, "llama_decode", lambda ctx, other: 0)
    code, found = examined()
    assert code == 1
    row = found["patches", "llama_cpp.llama_cpp:llama_decode"]
    assert "has parameters ('ctx', 'other')" in row["problem"]


def test_missing_engine(examined, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("llmaas_patches")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    code, found = examined()
    assert code == 1
    assert "cannot be imported" in found["versions", "llama-cpp-python"]["problem"]
    assert "cannot be checked" in found["patches", "all"]["problem"]


def test_missing_core(examined, monkeypatch):
    monkeypatch.setitem(sys.modules, "llmaas_plugins._native", None)
    code, found = examined()
    assert code == 1
    assert "C core cannot be loaded" in found["versions", "CPU kernels"]["problem"]


def test_unwritable_directory(examined, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("LLMAAS_PLUGINS", "recorder")
    monkeypatch.setenv("LLMAAS_PLUGINS__RECORDER__STORE", str(tmp_path / "file" / "store"))
    code, found = examined()
    row = found["machine", "plugins.recorder.store"]
    assert code == 1
    assert row["problem"] == "this process cannot write there"
    assert f"user {os.getuid()}" in row["next_step"]


def test_text(capsys, dist_plugins, monkeypatch):
    monkeypatch.setenv("LLMAAS_PLUGINS", "recorde")
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "[versions]\n  ok python = " in text
    assert "  !! plugins.recorde\n" in text
    assert "       -> install it" in text
    assert "1 problem found. `llmaas -v doctor` lists every" in text
    assert "(default)" not in text
    passed = int(re.search(r"\[patches\]\n  ok (\d+) checks passed\n", text)[1])
    assert main(["-v", "doctor"]) == 1
    long = capsys.readouterr().out
    assert "  ok service.max_context_tokens = unset   (default)" in long
    assert long.count("  ok llama_cpp.") == passed
    assert long.endswith("1 problem found.\n")


def test_room(tmp_path):
    found = room(tmp_path / "not" / "there" / "yet")
    assert found.is_writable
    assert found.free_bytes > 0
    assert not (tmp_path / "not").exists()


def cgroup(root, lines, limits):
    files = {"proc/self/cgroup": "\n".join(lines), **limits}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return memory_limit_bytes(root)


@pytest.mark.parametrize(
    ("lines", "limits", "expected"),
    [
        (["0::/a/b"], {"sys/fs/cgroup/a/b/memory.max": "4096\n"}, 4096),
        (["0::/a/b"], {"sys/fs/cgroup/a/b/memory.max": "max\n"}, None),
        (
            ["0::/a/b"],
            {"sys/fs/cgroup/a/b/memory.max": "9\n", "sys/fs/cgroup/a/memory.max": "5\n"},
            5,
        ),
        (["0::/"], {"sys/fs/cgroup/memory.max": "7"}, 7),  # inside a container
        (["4:memory:/x"], {"sys/fs/cgroup/memory/x/memory.limit_in_bytes": "8192"}, 8192),
        (["4:cpu,memory:/x"], {"sys/fs/cgroup/memory/memory.limit_in_bytes": "1024"}, 1024),
        (
            ["4:memory:/x"],
            {"sys/fs/cgroup/memory/x/memory.limit_in_bytes": "9223372036854771712"},
            None,
        ),
        (["3:cpuset:/", "0::/"], {}, None),
    ],
)
def test_memory_limit(tmp_path, lines, limits, expected):
    assert cgroup(tmp_path, lines, limits) == expected


def test_memory_limit_elsewhere(tmp_path):
    assert memory_limit_bytes(tmp_path) is None


def test_memory_limit_is_shown(examined, monkeypatch):
    monkeypatch.setattr(diagnosis, "memory_limit_bytes", lambda: 64 << 20)
    assert examined()[1]["machine", "cgroup memory limit"]["value"] == "64 MiB"


def test_a_cloud_whose_key_is_missing(examined, tmp_path, monkeypatch):
    path = tmp_path / "my.toml"
    path.write_text(
        '[cloud]\nbase_url = "https://example.org/v1"\nmodel = "large"\nkey_env = "CLOUD_KEY"\n'
        "[cloud.apps.mail]\nkeep = true\n[cloud.apps.diary]\nprivate = true\n"
    )
    monkeypatch.delenv("CLOUD_KEY", raising=False)
    code, found = examined("--config", str(path))
    assert code == 1
    assert found["configuration", "cloud key"]["problem"] == "the variable CLOUD_KEY is not set"
    assert found["configuration", "cloud.model"]["origin"] == "my.toml"
    assert found["configuration", "cloud.timeout_s"]["origin"] == "default"
    assert found["configuration", "cloud.apps.mail"]["value"] == "sent and kept"
    assert found["configuration", "cloud.apps.diary"]["value"] == "private"
    monkeypatch.setenv("CLOUD_KEY", "sesame")
    code, found = examined("--config", str(path))
    assert code == 0
    assert "sesame" not in repr(found)
