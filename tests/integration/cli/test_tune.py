"""``llmaas tune`` on the packaged model: what it switches on and off, and what breaks."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import subprocess
import sys

import pytest
from forked_commands import fork_children

from llmaas_eval.data import packaged_chats
from llmaas_plugins.cli.main import main
from llmaas_plugins.cli.tune import bench, datastore, restores
from llmaas_plugins.config import load_config
from llmaas_plugins.model.digest import file_digest

pytestmark = pytest.mark.slow

MINUTES = "--minutes", "4"  # more than is needed, even on a busy machine
SHORT = ((32, 8),)
"""Tokens of prompts and answers: with longer ones, the measurements would take all of the time."""
KV = '[plugins.kv_chunks]  # contexts\nstore = "kv"\n'


@pytest.fixture(scope="session")
def prepared(reference_model, tmp_path_factory):
    """Return the packaged model, prepared and packed."""
    folder = tmp_path_factory.mktemp("prepared")
    shutil.copy(reference_model, folder / "model.gguf")
    made = folder / "model.elastic.gguf"
    for command in (
        ["elastic", "prepare", str(folder / "model.gguf"), "--no-search", "--tokens", "64"],
        ["flash", "pack", str(made)],
    ):
        assert main(command) == 0
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch, prepared):
    """Return a folder with the model, whose home has no files of others."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("GGML_NO_BACKTRACE", "1")
    for name in ("LLMAAS_CONFIG", "LLMAAS_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(bench.Bench.lengths, "__defaults__", (SHORT,))
    monkeypatch.setattr(bench.Bench.pieces, "__defaults__", (bench.LEAST_ROUNDS,))
    monkeypatch.setattr(restores, "_LENGTHS", SHORT)
    monkeypatch.setattr(datastore, "_MOST_PIECES", 12)
    fork_children(monkeypatch)
    work = tmp_path / "work"
    shutil.copytree(prepared, work)
    monkeypatch.chdir(work)
    return work


def tune(capfd, *options, model="model.elastic.gguf"):
    """Run the command; return its exit status, its report, and the parts that it measured."""
    capfd.readouterr()
    status = main(["tune", model, *MINUTES, *options, "--json"])
    out, err = capfd.readouterr()
    return status, json.loads(out), re.findall(r"^part \d of \d: (\w+)", err, re.MULTILINE)


def verdicts(report):
    return {name: found["verdict"] for name, found in report["plugins"].items()}


def cases(report, plugin):
    return {case["name"]: case for case in report["plugins"][plugin]["figures"]["cases"]}


def build_unrelated(folder):
    """Build a datastore of numbers, which tell nothing about words."""
    chance = random.Random(0)
    rows = [
        {"messages": [{"role": "user", "content": f"{chance.getrandbits(512):x}"}]}
        for _ in range(4)
    ]
    (folder / "numbers.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = "--model", "model.elastic.gguf", "--store", "knn"
    assert main(["datastore", "build", "numbers.jsonl", *options]) == 0


def test_plugins_are_switched_by_what_they_gain(folder, capfd):
    build_unrelated(folder)
    config = folder / "llmaas.toml"
    config.write_text(
        f"# mine\n{KV}[plugins.elastic]\nenabled = false\n[plugins.deadlines]\n"
        '[plugins.flash_weights]\n[plugins.knn_lm]\nstore = "knn"\n'
    )
    before = config.read_text()
    options = "--chats", *map(str, packaged_chats())
    status, report, parts = tune(capfd, *options, "--dry-run")
    assert (status, report["ok"]) == (0, True)
    assert parts == ["kv_chunks", "elastic", "deadlines", "flash_weights", "knn_lm", "all"]
    assert config.read_text() == before
    assert [*report["plugins"]] == [*parts[:-1], "together"]

    assert verdicts(report)["flash_weights"] == "off"
    assert "fit into" in report["plugins"]["flash_weights"]["reason"]
    assert verdicts(report)["knn_lm"] == "off"  # it knows nothing about these chats
    assert cases(report, "elastic")["level 1.0"]["is_same"]
    assert cases(report, "elastic")["level 0.2"]["agreement"] < 0.9
    assert {*cases(report, "kv_chunks")} == {"from RAM", "from disk"}
    assert all(case["agreement"] > 0.8 for case in cases(report, "kv_chunks").values())
    assert cases(report, "deadlines")["nothing named"]["is_same"]

    status, again, parts = tune(capfd, *options)
    assert (status, parts) == (0, [])  # all of it is known
    assert again["plugins"] == report["plugins"]
    assert load_config(config).enabled() == [
        name for name, verdict in verdicts(again).items() if verdict == "on" and name != "together"
    ]
    changed = config.read_text()
    assert changed.startswith("# mine\n[plugins.kv_chunks]  # contexts\n")
    assert "[plugins.knn_lm]\nenabled = false\nstore" in changed

    config.write_text(changed.replace('store = "kv"', 'store = "kv2"'))
    assert set(tune(capfd, *options)[2]) <= {"kv_chunks", "all"}
    assert not [path for path in folder.iterdir() if path.name.startswith(".llmaas-tune-")]


def test_a_part_that_fails_leaves_the_others(folder, capfd):
    config = folder / "llmaas.toml"
    text = f'{KV}[plugins.flash_weights]\nmemory_budget = "2 MiB"\n[plugins.knn_lm]\nstore = "x"\n'
    config.write_text(text)
    status, report, _ = tune(capfd)
    assert status == 1
    assert verdicts(report) | {"kv_chunks": ""} == {
        "kv_chunks": "", "flash_weights": "failed", "knn_lm": "failed",
    } | ({"together": "on"} if verdicts(report)["kv_chunks"] == "on" else {})  # fmt: skip
    assert "UnmetBudgetError" in report["plugins"]["flash_weights"]["reason"]
    assert not {"flash_weights", "knn_lm"} & {*load_config(config).enabled()}
    assert tune(capfd)[2][:2] == ["flash_weights", "knn_lm"]  # they may work now


def test_wrong_weights_are_noticed(folder, capfd):
    config, budget = folder / "llmaas.toml", 2
    for _ in range(4):  # a budget for the model, then one for its context, too
        config.write_text(f'[plugins.flash_weights]\nmemory_budget = "{budget} MiB"\n')
        status, report, _ = tune(capfd)
        needs = re.search(r"expected (\d+) MiB", report["plugins"]["flash_weights"]["reason"])
        if needs is None:
            break
        budget = int(needs[1]) + 2
    assert (status, verdicts(report)["flash_weights"]) == (0, "on")
    assert cases(report, "flash_weights")["exact"]["is_same"]

    packed = folder / "model.elastic.packed"
    content = bytearray(packed.read_bytes())
    content[len(content) // 2 :: 8] = bytes(len(content[len(content) // 2 :: 8]))
    packed.write_bytes(content)
    status, report, _ = tune(capfd)
    assert (status, verdicts(report)) == (1, {"flash_weights": "broken"})
    assert "did not give the text" in report["plugins"]["flash_weights"]["reason"]
    assert load_config(config).enabled() == []


def test_an_app_gets_the_prepared_file_and_so_does_this(folder, capfd):
    shutil.move("model.elastic.gguf", "other.gguf")
    (folder / "llmaas.toml").write_text(
        f'[models."{folder}/model.gguf"]\nfile = "{folder}/other.gguf"\n'
        f'digest = "{file_digest(folder / "model.gguf")}"\n'
        f'file_digest = "{file_digest(folder / "other.gguf")}"\n[plugins.elastic]\n'
    )
    status, report, _ = tune(capfd, model="model.gguf")
    assert status == 0
    assert cases(report, "elastic")["prepared file"]["agreement"] > 0.9


def test_a_command_that_was_stopped_goes_on(folder, capfd):
    (folder / "llmaas.toml").write_text(f"{KV}[plugins.elastic]\n")
    command = [sys.executable, "-m", "llmaas_plugins.cli.main", "tune", "model.elastic.gguf"]
    process = subprocess.Popen(
        [*command, "--minutes", "1"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    with process:
        said = iter(process.stderr.readline, "")
        next(line for line in said if line.startswith("part 2 of 3"))
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == 128 + signal.SIGINT
    assert "stopped; what was measured is kept; the same command goes on" in rest
    assert (folder / "llmaas.toml").read_text() == f"{KV}[plugins.elastic]\n"
    status, _, parts = tune(capfd, "--minutes", "1")
    assert (status, parts[0]) == (0, "elastic")
