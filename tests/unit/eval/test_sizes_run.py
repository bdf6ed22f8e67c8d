"""Every feature run on a model: limits, figures, verdicts, and runs that go on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from llmaas_eval.sizes import running
from llmaas_eval.sizes.activity import ACTIVITIES
from llmaas_eval.sizes.cli import main
from llmaas_eval.sizes.features import GROUPS, Feature, Group, remove
from llmaas_eval.sizes.report import TABLES
from llmaas_eval.sizes.running import run_features
from llmaas_eval.sizes.shapes import SizedShape
from llmaas_eval.sizes.watching import Limits, watch
from llmaas_eval.sizes.writing import plan_model, write_sized
from llmaas_plugins.reference_model import reference_model_path

MB = 1_000_000
AMPLE = Limits(60.0, 8 << 30)


def watched(tmp_path, code, limits=AMPLE):
    return watch([sys.executable, "-c", code], os.environ, tmp_path, limits)


# -- watching -----------------------------------------------------------------------------------


def test_private_memory_counts_and_mapped_files_count_apart(tmp_path):
    (tmp_path / "file").write_bytes(bytes(80 * MB))
    idle = watched(tmp_path, "import time; time.sleep(0.5)")
    private = watched(tmp_path, "import time; room = b'1' * 60_000_000; time.sleep(0.5)")
    mapped = watched(
        tmp_path,
        "import mmap, time; file = open('file', 'rb')\n"
        "room = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ); room.find(b'1'); time.sleep(0.5)",
    )
    assert 55 * MB < private.private_bytes - idle.private_bytes < 65 * MB
    assert mapped.private_bytes - idle.private_bytes < 10 * MB
    assert mapped.resident_bytes - idle.resident_bytes > 60 * MB
    assert mapped.read_bytes - idle.read_bytes < 10 * MB


def test_bytes_that_are_read_count_with_those_of_children(tmp_path):
    (tmp_path / "file").write_bytes(bytes(50 * MB))
    read = "import time; open('file', 'rb').read(); time.sleep(0.5)"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {read!r}])"
    assert 50 * MB < watched(tmp_path, child).read_bytes < 100 * MB


def test_silence_is_the_longest_time_without_output(tmp_path):
    code = "import time\nfor i in (1, 9, 1): print('line', i, flush=True); time.sleep(i / 10)"
    found = watched(tmp_path, code)
    assert found.said == ("line 1", "line 9", "line 1")
    assert 0.8 < found.silent_s < found.seconds


def test_progress_bars_are_shown(tmp_path):
    code = (
        "import time\nfrom llmaas_plugins.cli.output import progress_bar\n"
        "with progress_bar('working', 'B', 100) as bar:\n"
        "    for _ in range(10): time.sleep(0.12); bar.update(10)"
    )
    assert any(line.startswith("working:  50%") for line in watched(tmp_path, code).said)


@pytest.mark.parametrize(
    ("code", "limits", "status"),
    [
        ("raise SystemExit(2)", AMPLE, 2),
        ("import os; os.abort()", AMPLE, -6),
        ("import time; time.sleep(60)", Limits(0.5, 8 << 30), None),
        ("room = bytearray(1 << 30)", Limits(60, 1 << 29), 1),
    ],
)
def test_how_commands_end(tmp_path, code, limits, status):
    found = watched(tmp_path, code, limits)
    assert found.status == status
    assert found.seconds < 30
    assert found.silent_s > 0
    if limits.private_bytes < 1 << 30:
        assert found.said[-1] == "MemoryError"


# -- features -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("sizes") / "small.gguf"
    shape = SizedShape("llama", "", 2, 256, 4, 2, 64, 512, 2048)
    plan = plan_model("small", shape, "Q4_0", reference_model_path())
    assert sum(write_sized(path, plan, ACTIVITIES["reference"])) == path.stat().st_size
    return path


def run(model, folder, *options):
    target = folder.parent / f"{folder.name}.json"
    command = ["run", str(model), "--folder", str(folder), "--json", str(target), *options]
    assert main(command) == 0
    return {row["feature"]: row for row in json.loads(target.read_text())["rows"]}


@pytest.mark.slow
def test_features_run_once_and_a_run_goes_on(model, tmp_path, capfd):
    folder = tmp_path / "run"
    found = run(model, folder, "--only", "stock llama.cpp", "kv_chunks:")
    assert [row["verdict"] for row in found.values()] == ["works"] * 6
    assert found["kv_chunks: restore them"]["why"] == "400 tokens restored, the same answer"
    restored = found["kv_chunks: restore it"]["why"]
    assert re.fullmatch(r"1984 tokens restored, answered in [\d.]+ s, the same answer", restored)
    assert found["open, stock llama.cpp"]["private_bytes"] > 10 * MB
    assert not (folder / "kv").exists(), "a group's files are deleted"
    assert "kv_chunks: restore them ..." in capfd.readouterr().err
    more = run(model, folder, "--only", "stock llama.cpp", "kv_chunks:", "exact, not packed")
    assert capfd.readouterr().err == "flash_weights: exact, not packed ...\n"
    refused = more.pop("flash_weights: exact, not packed")
    assert more == found
    assert refused["verdict"] == "refused"
    assert "fit into" in refused["why"]


@pytest.mark.slow
def test_a_feature_is_skipped_if_what_it_needs_has_failed(model, tmp_path):
    found = run(model, tmp_path / "run", "--only", "elastic: p", "--minutes", "0.001")
    assert found["elastic: prepare"]["verdict"] == "failed"
    assert found["elastic: prepare"]["why"].startswith("stopped after 0 s: ")
    assert found["elastic: profile"] == {
        "feature": "elastic: profile", "verdict": "skipped", "why": "needs elastic: prepare",
    }  # fmt: skip


def groups(monkeypatch, **commands):
    """Run these commands as features, of which each needs the file that the first one makes."""
    first, *others = commands
    features = [Feature(first, [sys.executable, "-c", commands[first]])]
    features += [Feature(name, [sys.executable, "-c", commands[name]], first) for name in others]
    monkeypatch.setattr(running, "GROUPS", (Group(tuple(features), ("made.txt",)),))


def verdicts(model, folder, *only):
    return {row["feature"]: row["verdict"] for row in run_features(model, folder, AMPLE, only)}


def test_files_that_are_gone_are_made_again_for_a_feature_that_has_to_run(
    model, tmp_path, monkeypatch, capfd
):
    groups(monkeypatch, make="open('made.txt', 'w')", use="open('made.txt')")
    assert verdicts(model, tmp_path, "make") == {"make": "works"}
    assert verdicts(model, tmp_path, "use") == {"make": "works", "use": "works"}
    assert not (tmp_path / "made.txt").exists()
    assert verdicts(model, tmp_path) == {"make": "works", "use": "works"}
    assert capfd.readouterr().err == "make ...\nmake ...\nuse ...\n"


def test_what_failed_is_tried_again(model, tmp_path, monkeypatch, capfd):
    groups(monkeypatch, make="open('made.txt', 'w')", use="open('missing')", refuse="exit(2)")
    for use in ("failed", "works"):
        expected = {"make": "works", "use": use, "refuse": "refused"}
        assert verdicts(model, tmp_path) == expected
        (tmp_path / "missing").touch()
    assert capfd.readouterr().err.splitlines() == [
        *("make ...", "use ...", "refuse ..."),
        *("make ...", "use ..."),
    ]


def test_rows_do_not_name_the_folder(model, tmp_path, monkeypatch):
    groups(monkeypatch, say="import os; print('kept in', os.getcwd())")
    (row,) = run_features(model, tmp_path, AMPLE)
    assert row["why"] == "kept in ~"
    assert row["said"] == ["kept in ~"]


@pytest.mark.slow
def test_a_run_that_is_terminated_leaves_no_process(model, tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "llmaas_eval.sizes", "run", model, "--folder", folder]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr.readline() == "open, stock llama.cpp ...\n"
        process.terminate()
        process.communicate()
    assert process.returncode != 0
    folders = {os.path.realpath(path) for path in Path("/proc").glob("[0-9]*/cwd")}
    assert str(folder) not in folders


def test_another_file_than_a_model_is_refused(tmp_path, capsys):
    path = tmp_path / "text.gguf"
    path.write_text("no model")
    assert main(["run", str(path), "--folder", str(tmp_path / "run")]) == 2
    assert "is not a GGUF file" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_needs_are_earlier_features_of_the_same_group():
    names = [feature.name for group in GROUPS for feature in group.features]
    assert len(set(names)) == len(names)
    for group in GROUPS:
        known = {""}
        for feature in group.features:
            assert feature.needs in known
            known.add(feature.name)


def test_files_and_folders_of_a_group_are_deleted(tmp_path):
    (tmp_path / "kv" / "deep").mkdir(parents=True)
    for name in ("model.gguf", "model.packed", "model.packed.partial"):
        (tmp_path / name).touch()
    remove(tmp_path, ["kv", "model.packed*"])
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_the_table_has_all_figures_and_short_reasons():
    row = {
        "feature": "doctor", "verdict": "refused", "why": "long " * 100, "seconds": 12.34,
        "private_bytes": 1234 * MB, "resident_bytes": 5 * MB, "read_bytes": 0, "silent_s": 2.0,
    }  # fmt: skip
    skipped = {"feature": "mix", "verdict": "skipped", "why": "needs build"}
    table = TABLES["sizes"]([{"model": "llama", "rows": [row, skipped]}])
    assert table.rows[0][:7] == ["doctor", "refused", "12.3", "1.23", "0.01", "0.00", "2.0"]
    assert len(table.rows[0][7]) == 160
    assert table.rows[1] == ["mix", "skipped", *[""] * 5, "needs build"]


def test_models_are_shown_side_by_side():
    good = {"feature": "build", "verdict": "works", "why": "done", "seconds": 61.6,
            "private_bytes": 5120 * MB}  # fmt: skip
    refused = {**good, "verdict": "refused", "why": "no experts"}
    skipped = {"feature": "mix", "verdict": "skipped", "why": "needs build"}
    models = [
        {"model": "a", "rows": [good]},
        {"model": "b", "rows": [refused, skipped]},
        {"model": "c", "rows": [refused]},
    ]
    table = TABLES["sizes"](models)
    assert table.columns == ["feature", "a", "b", "c", "why not"]
    assert table.rows == [
        ["build", "62 s, 5.1 GB", "refused", "refused", "no experts"],
        ["mix", "", "skipped", "", ""],
    ]
