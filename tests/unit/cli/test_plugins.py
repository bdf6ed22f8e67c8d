"""``llmaas plugins``, and the behavior that all sub-commands share."""

from __future__ import annotations

import json
import logging
import os
import sys

import fork_server
import pytest

import llmaas_plugins
from llmaas_hooks import LlmaasError
from llmaas_plugins.cli import commands
from llmaas_plugins.cli.main import main


@pytest.fixture
def listed(capsys, dist_plugins):
    def run(*args):
        assert main(["plugins", "--json", *args]) == 0
        return {row["name"]: row for row in json.loads(capsys.readouterr().out)}

    return run


def test_off_plugins_are_listed_without_import(listed, monkeypatch):
    monkeypatch.delitem(sys.modules, "llmaas_test_plugins")
    rows = listed()
    assert "llmaas_test_plugins" not in sys.modules
    recorder = rows["recorder"]
    assert recorder["distribution"] == "llmaas-test-plugins 1.0"
    assert (recorder["enabled"], recorder["loaded"], recorder["hooks"]) == (False, False, [])
    assert rows["broken_import"]["error"] is None


def test_enabled_plugins_show_hooks_and_keys(listed, monkeypatch):
    monkeypatch.setenv("LLMAAS_PLUGINS", "recorder")
    recorder = listed()["recorder"]
    assert recorder["enabled"]
    assert recorder["hooks"] == ["llmaas_shutdown", "llmaas_status"]
    assert recorder["keys"] == [
        {"name": "budget", "type": "size", "default": "1 KiB", "description": "Bytes."},
        {
            "name": "level",
            "type": "int",
            "default": "3",
            "description": "How much to record.",
        },
        {"name": "store", "type": "path", "default": "~/recorder", "description": ""},
    ]
    assert recorder["error"] is None


def test_listing_constructs_nothing(listed, dist_plugins):
    listed("--all")
    assert dist_plugins.events == []


def test_all_loads_the_others_and_failures_are_rows(listed):
    rows = listed("--all")
    assert rows["recorder"]["loaded"]
    assert not rows["recorder"]["enabled"]
    assert "failed in import" in rows["broken_import"]["error"]
    assert "SystemExit" in rows["exits"]["error"]
    assert (
        rows["misspelled"]["error"] == "unknown hook 'llmaas_logit'. Did you mean 'llmaas_logits'?"
    )
    assert "expected a plugin class" in rows["not_a_class"]["error"]
    assert "uninstall all but one" in rows["twin"]["error"]


def test_a_plugin_that_prints_spoils_no_json(monkeypatch, capsys, dist_plugins):
    monkeypatch.delitem(sys.modules, "llmaas_test_chatty", raising=False)
    assert main(["plugins", "--json", "--all"]) == 0
    captured = capsys.readouterr()
    assert "chatty" in {row["name"] for row in json.loads(captured.out)}
    assert captured.err == "Welcome to chatty!\n"


def test_a_distribution_without_metadata(listed):
    row = listed("--all")["bare"]
    assert row["loaded"]
    assert row["error"] is None


@pytest.mark.slow
def test_every_plugin_broken_and_help_is_there(tmp_path):
    (tmp_path / "broken-1.dist-info").mkdir()
    (tmp_path / "broken-1.dist-info" / "entry_points.txt").write_text(
        "[llmaas_plugins]\nkv_chunks = gone:Gone\nbroken = broken:Broken\n"
    )
    (tmp_path / "broken.py").write_text("raise RuntimeError('no luck')")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "LLMAAS_PLUGINS": "broken,kv_chunks"}
    command = [sys.executable, "-m", "llmaas_plugins.cli.main"]
    said = {
        argument: fork_server.run([*command, argument], env=environ, capture_output=True, text=True)
        for argument in ("--help", "plugins", "doctor")
    }
    assert [done.returncode for done in said.values()] == [0, 0, 1]
    assert not any(done.stderr for done in said.values())
    problem = "plugin 'broken' failed in import: RuntimeError: no luck"
    for argument in ("plugins", "doctor"):
        assert problem in said[argument].stdout
        assert "installed by" in said[argument].stdout  # kv_chunks, twice


@pytest.mark.parametrize(
    ("variables", "name", "error"),
    [
        ({"LLMAAS_PLUGINS": "recorde"}, "recorde", "Did you mean 'recorder'"),
        ({"LLMAAS_PLUGINS": "broken_import"}, "broken_import", "failed in import"),
        (
            {"LLMAAS_PLUGINS": "recorder", "LLMAAS_PLUGINS__RECORDER__LEVEL": "0"},
            "recorder",
            "plugins.recorder (env): level",
        ),
    ],
)
def test_failures_are_rows(listed, monkeypatch, variables, name, error):
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert error in listed()[name]["error"]


def test_text(capsys, dist_plugins, monkeypatch):
    monkeypatch.setenv("LLMAAS_PLUGINS", "recorder,broken_import")
    assert main(["plugins"]) == 0
    text = capsys.readouterr().out
    assert "recorder  (llmaas-test-plugins 1.0)  enabled" in text
    assert "  hooks: llmaas_shutdown, llmaas_status" in text
    assert "  level: int = 3\n      How much to record." in text
    assert "  error: plugin 'broken_import' failed in import" in text
    assert "misspelled  (llmaas-test-plugins 1.0)  off\n  (not imported; use --all" in text


def test_config_file(listed, tmp_path):
    path = tmp_path / "llmaas.toml"
    path.write_text("[plugins.recorder]")
    assert listed("--config", str(path))["recorder"]["enabled"]


def test_errors_are_one_line(capsys, tmp_path):
    assert main(["plugins", "--config", str(tmp_path / "no.toml")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("llmaas: error: cannot read configuration ")
    assert captured.err.count("\n") == 1


def test_version(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"llmaas {llmaas_plugins.__version__}\n"


@pytest.mark.parametrize(("argv", "code"), [([], 2), (["--help"], 0), (["plugins", "--x"], 2)])
def test_usage(capsys, argv, code):
    with pytest.raises(SystemExit) as left:
        main(argv)
    assert left.value.code == code
    captured = capsys.readouterr()
    assert "usage: llmaas" in captured.out + captured.err


def test_a_command_that_cannot_be_imported_spoils_no_other(capsys, monkeypatch):
    monkeypatch.setattr(commands, "_COMMANDS", ("plugins", "absent"))
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    assert "cannot be loaded" in capsys.readouterr().out
    assert main(["absent", "--any", "thing"]) == 2
    assert "`llmaas absent` cannot be loaded" in capsys.readouterr().err


def test_func_contract(monkeypatch, capsys):
    class Command:
        @staticmethod
        def add_parser(subparsers):
            subparsers.add_parser("plain").set_defaults(func=lambda args: 1)
            rest = subparsers.add_parser("rest")
            rest.set_defaults(func=lambda args, rest: len(rest), takes_rest=True)
            fails = subparsers.add_parser("fails")
            fails.set_defaults(func=fail)

    def fail(args):
        raise LlmaasError("two\n  lines")

    monkeypatch.setitem(sys.modules, "llmaas_plugins.cli.fake", Command)
    monkeypatch.setattr(commands, "_COMMANDS", ("fake",))
    assert main(["plain"]) == 1
    assert main(["rest", "--model", "x", "-v"]) == 3
    assert main(["fails"]) == 2
    assert capsys.readouterr().err == "llmaas: error: two lines\n"


def test_verbose_touches_only_the_suites_logger(capsys):
    logger, root = logging.getLogger("llmaas"), logging.getLogger()
    before = list(root.handlers)
    main(["-vv", "plugins"])
    assert logger.level == logging.DEBUG
    assert root.handlers == before
