"""``llmaas flash plan``: the figures it predicts for each mode, against measured ones."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import pytest
from gguf import GGMLQuantizationType

from llmaas_eval.models import Shape, write_random_model
from llmaas_plugins.cli.main import main
from llmaas_plugins.flash_weights.channels import channel_path
from llmaas_plugins.flash_weights.disk import Disk, Rate
from llmaas_plugins.flash_weights.packed import packed_path

SHAPE = Shape(n_layer=6, n_embd=512, n_head=8, n_head_kv=4, n_ff=4096, n_ctx=512)
"""A shape with 45 MB of weights in Q8_0."""
MIB = 1 << 20


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a model with both files."""
    path = tmp_path_factory.mktemp("plan") / "model.gguf"
    write_random_model(path, SHAPE, GGMLQuantizationType.Q8_0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("llmaas_plugins.cli.flash.pack._N_TOKENS", 64)
        patched.setattr("llmaas_plugins.cli.flash.pack._N_FORESEEN", 16)
        command = ["flash", "pack", "--sparse", "--equal-shares", "--group-layers", "2", str(path)]
        assert main(command) == 0
    return path


@pytest.fixture
def alone(made, tmp_path):
    """Return the model without its files."""
    return shutil.copyfile(made, tmp_path / made.name)


@pytest.fixture
def machine(monkeypatch):
    """Fix the speeds of disk and memory, and the process size at 60 MiB."""
    asked = []

    def disk(path, seconds, progress):
        asked.append((path, seconds))
        progress(seconds)
        rates = Rate(4096, 64, 0.4e9), Rate(262144, 4, 1.48e9), Rate(1 << 20, 4, 1.5e9)
        return Disk(8e-6, 1.5e9, 64, 1, rates)

    monkeypatch.setattr("llmaas_plugins.flash_weights.disk.measure_disk", disk)
    monkeypatch.setattr(
        "llmaas_plugins.flash_weights.memory_bandwidth.memory_rate", lambda *_: 10e9
    )
    monkeypatch.setattr("llmaas_plugins.machine.resident_bytes", lambda: 60 * MIB)
    return asked


def run(capsys, model, *options, budget="150 MiB"):
    """Return the command's exit status, output and errors."""
    capsys.readouterr()
    asked = () if budget is None else ("--memory-budget", budget)
    status = main(["flash", "plan", str(model), *asked, "--context", "256", *map(str, options)])
    return status, *capsys.readouterr()


def report(capsys, model, *options, **settings):
    status, out, _ = run(capsys, model, "--json", *options, **settings)
    assert status == 0
    return json.loads(out)


@pytest.mark.slow
def test_a_table_and_settings(made, capsys, machine):
    status, out, err = run(capsys, made, "--sparsity", "0.6", "--seconds", "3")
    assert (status, err) == (0, "")
    assert machine == [(packed_path(made), 3.0)]
    lines = out.splitlines()
    assert "8 µs a read and 1.50 GB/s" in out
    assert "channels up to 11 KiB apart" in out
    head = next(i for i, line in enumerate(lines) if line.startswith("mode"))
    table = [
        line.split()[:2] for line in lines[head + 1 :] if line[:5] in {"exact", "spars", "pipel"}
    ]
    assert table[:6] == [["exact", "0"], *4 * [["sparse", "60"]], ["pipeline", "60"]]
    assert [line.count("preload ") for line in lines[head + 1 : head + 6]] == [0, 0, 0, 1, 1]
    assert re.search(r"foresees \d+ % of those that a token uses \(measured\)", out)
    assert "(from measured magnitudes)" in out
    assert out.endswith(
        '[plugins.flash_weights]\nmemory_budget = "150 MiB"\nqueue_depth = 4\n'
        'read_size = "1024 KiB"\n'
    )
    assert "Recommended: exact; " in out
    assert "There is no" not in out


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("planned", "expected"),
    [
        (("1 GiB", 0), r"exact; all weights fit, and the sparse mode would be [\d.]+ times as"),
        (("least", 0), r"exact; nothing else works here\."),
        (("150 MiB", 1e9), r"exact; the sparse mode would be [\d.]+ times as fast, but it change"),
        (("150 MiB", 0), r"sparse; [\d.]+ times as fast as the exact mode, but it changes"),
    ],
)
def test_why(made, capsys, monkeypatch, planned, expected):
    budget, least_speedup = planned
    monkeypatch.setattr("llmaas_plugins.flash_weights.planner._LEAST_SPEEDUP", least_speedup)
    if budget == "least":
        budget = str(report(capsys, made)["exact"]["least_budget"])
    status, out, _ = run(capsys, made, "--sparsity", "0.5", budget=budget)
    assert status == 0
    assert re.search(f"^Recommended: {expected}", out, re.MULTILINE)
    mode = 'mode = "sparse"\nsparsity = 0.5\ncache = "busiest"\n'
    reading = 'queue_depth = 64\nread_size = "256 KiB"\nread_gap = "11 KiB"\n'
    assert out.endswith(mode + reading) == expected.startswith("sparse")


def test_for_programs(made, capsys, machine):
    found = report(capsys, made, "--sparsity", "0.9", budget="150 MiB")
    assert found["machine"]["disk"]["read_s"] == 8e-6
    assert found["run"]["versions"].keys() == {"llama-cpp-python", "llmaas-plugins"}
    assert [row["group_layers"] for row in found["sparse"]] == [2] * 4
    assert [row["preload"] for row in found["sparse"]] == [False, False, True, True]
    assert found["channels"]["measured"] == {"similarity": True, "hit_rate": True}
    assert 0 < found["channels"]["similarity"] < 1
    on_demand = [row for row in found["sparse"] if not row["preload"]]
    assert all(found["exact"]["read"] > row["read"] > 0 for row in on_demand)
    assert [row["group_layers"] for row in found["pipeline"]] == list(
        range(1, len(found["pipeline"]) + 1)
    )
    assert found["planned_from"] == str(packed_path(made))
    assert found["measured"] is None
    assert found["notes"] == []
    exact = {"queue_depth": 4, "read_size": "1024 KiB"}
    sparse = {"queue_depth": 64, "read_size": "256 KiB", "read_gap": "11 KiB"}
    sparse |= {"mode": "sparse", "sparsity": 0.9, "cache": found["recommended"]["keeps"]}
    if found["recommended"]["preload"]:
        sparse["preload"] = True
    mode = found["recommended"]["mode"]
    assert found["settings"] == {"memory_budget": "150 MiB"} | (
        exact if mode == "exact" else sparse
    )


def test_the_context_takes_memory(made, capsys, machine):
    short, long = (
        report(capsys, made, "--context", n, budget="1 GiB")["exact"] for n in (256, 1024)
    )
    cells = 768 * 6 * 2 * 2 * 4 * 64
    assert long["least_budget"] - short["least_budget"] >= cells


def test_without_a_packed_file(alone, capsys, machine):
    found = report(capsys, alone)
    assert machine[0][0] == alone
    assert found["planned_from"] == str(alone)
    assert any("no packed file" in note and "flash pack" in note for note in found["notes"])
    assert any(f"flash pack --sparse {alone}" in note for note in found["notes"])
    keeps = ["streamed", *2 * ["busiest", "shared"]]
    assert [row["keeps"] for row in found["sparse"]] == keeps
    assert found["channels"]["measured"] == {"similarity": False, "hit_rate": False}
    assert "(assumed)" in run(capsys, alone)[1]


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("place", [packed_path, channel_path], ids=["packed", "channels"])
@pytest.mark.parametrize("content", [b"broken", None], ids=["broken", "other"])
def test_files_that_cannot_be_used(alone, made, capsys, place, content):
    if content is None:
        shutil.copyfile(place(made), place(alone))
        with alone.open("r+b") as file:
            file.seek(-100, 2)
            file.write(b"changed!")
    else:
        place(alone).write_bytes(content)
    notes = report(capsys, alone)["notes"]
    assert any(f"{place(alone)} cannot be used" in note for note in notes)


@pytest.mark.usefixtures("machine")
def test_without_a_budget_the_plan_follows_the_system(made, capsys, monkeypatch):
    monkeypatch.setattr("llmaas_plugins.process_memory.available_bytes", lambda: 200 * MIB)
    found = report(capsys, made, budget=None)
    assert found["budget"] == 180 * MIB
    assert "memory_budget" not in found["settings"]
    out = run(capsys, made, budget=None)[1]
    assert "This plan is for 180 MiB, nine tenths of the memory that is available now" in out
    assert "[plugins.flash_weights]\n" in out


def test_a_budget_that_is_too_small(made, capsys, machine):
    status, out, err = run(capsys, made, budget="20 MiB")
    assert (status, out) == (2, "")
    assert "a memory_budget of 20 MiB cannot be met" in err
    assert machine == []  # no measurement is made for that
    least = int(err.partition("expected ")[2].split()[0])
    assert run(capsys, made, budget=f"{least} MiB")[0] == 0
    assert run(capsys, made, budget=f"{least - 4} MiB")[0] == 2  # it is 3 MiB above the need


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory-budget", "much"], "expected a size"),
        (["--memory-budget", "0"], "is not above 0"),
        (["--sparsity", "0.96"], "expected a share from 0 to 0.95, found '0.96'"),
        (["--sparsity", "half"], "expected a share from 0 to 0.95, found 'half'"),
        (["--context", "0"], "expected an integer from 1 on, found '0'"),
        (["--context", "1.5"], "1.5"),
        (["--seconds", "inf"], "expected a number above 0, up to 1e+09, found 'inf'"),
        (["--seconds", "soon"], "expected a number above 0, up to 1e+09, found 'soon'"),
    ],
)
def test_what_cannot_be_asked_for(made, capsys, options, message):
    with pytest.raises(SystemExit) as error:
        run(capsys, made, *options)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_what_is_no_model(tmp_path, capsys):
    status, _, err = run(capsys, tmp_path / "none.gguf")
    assert status == 2
    assert "found no file" in err


MEASURES = """
import sys
import llama_cpp
from llmaas_plugins.server import import_server
from llmaas_plugins.cli.flash import plan as flash_plan
from llmaas_plugins.cli.main import main
from llmaas_plugins.flash_weights import planner
from llmaas_plugins.flash_weights import memory_bandwidth
from llmaas_plugins.machine import resident_bytes

flash_plan._WARM_TOKENS, flash_plan._TOKENS = 12, 8
model, planner._LEAST_SPEEDUP, *options = sys.argv[1], float(sys.argv[2]), *sys.argv[3:]
import_server()  # as the plan does
budget = f"{(resident_bytes() >> 20) + 90} MiB"
common = ["--seconds", "0.2", "--sparsity", "0.7", "--context", "256", "--measure"]
sys.exit(main(["flash", "plan", model, "--memory-budget", budget, *common, *options]))
"""


def measure(model, least_speedup, *options):
    """Run the plan in a fresh process, whose memory holds nothing of a model yet."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURES, str(model), str(least_speedup), *options],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "least_speedup"), [("exact", "inf"), ("sparse", "0")])
def test_what_it_really_takes(made, mode, least_speedup):
    """Measure on the real disk with a real model; half of the weights do not fit."""
    found = json.loads(measure(made, least_speedup, "--json"))
    predicted, measured = found["recommended"], found["measured"]
    assert predicted["mode"] == mode
    assert 0 < predicted["cache"] < 40 * MIB
    assert measured["token_s"] > 0
    # a process's memory is known only to within some MiB
    assert measured["read"] == pytest.approx(predicted["read"], abs=12 * MIB)


@pytest.mark.slow
def test_what_it_really_takes_in_words(made):
    out = measure(made, "inf")
    assert re.search(
        r"^Measured: [\d.]+ ms a token \(predicted [\d.]+\), [\d.]+ MB read", out, re.MULTILINE
    )
