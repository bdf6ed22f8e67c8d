"""The study of recovery: arms that learn what they say, and results that are not measured twice."""

from __future__ import annotations

import lzma
from dataclasses import replace

import numpy as np
import pytest
from elastic_models import shuffled
from gguf import GGMLQuantizationType

from llmaas_eval import data
from llmaas_eval.elastic.scores import random_scores
from llmaas_eval.families import write_family
from llmaas_eval.recovery import llm_pruner
from llmaas_eval.recovery.report import TABLES, closure, report
from llmaas_plugins.elastic.metadata import read_elastic
from llmaas_plugins.elastic.scores import scores_path, write_scores
from llmaas_plugins.elastic.units import blocks_of

torch = pytest.importorskip("torch", reason="make test-train installs it")
arms = pytest.importorskip("llmaas_eval.recovery.arms")
plots = pytest.importorskip("llmaas_eval.recovery.plots")
recovery = pytest.importorskip("llmaas_plugins.training.recovery")
student = pytest.importorskip("llmaas_plugins.training.student")
study = pytest.importorskip("llmaas_eval.recovery.study")

WINDOWS = np.random.default_rng(0).integers(3, 4000, (20, 32), np.int32)
LEVELS = [0.6, 0.5, 0.4, 0.3]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    source = write_family("llama", folder / "model.gguf", weights=GGMLQuantizationType.F32)
    return shuffled(source, folder / "model.elastic.gguf")


@pytest.fixture
def material(prepared, tmp_path):
    kinds = {"own": WINDOWS[16:18], "other": WINDOWS[18:]}
    recipe, elastic = recovery.Recipe(n_tokens=256, rank=2), read_elastic(prepared)
    return study.Material(
        prepared, elastic, "uniform", WINDOWS[:16], kinds, recipe, tmp_path / "out"
    )


def test_every_arm_has_rows_that_are_measured_once(material, monkeypatch):
    rows = study.study(material, [*arms.ARMS], LEVELS)
    asked = {(arm, level, kind) for arm in arms.ARMS for level in LEVELS for kind in material.kinds}
    assert {(row["arm"], row["level"], row["kind"]) for row in rows} == asked
    assert len(rows) == len(asked)
    by_key = {(row["arm"], row["level"], row["kind"]): row for row in rows}
    assert by_key["none", 0.5, "own"]["n_tokens"] == 0
    assert by_key["KL, a quarter of the tokens", 0.5, "own"]["n_tokens"] == 64
    none = by_key["none", 0.3, "own"]
    for arm in arms.ARMS:
        row = by_key[arm, 0.3, "own"]
        assert row["whole"] == pytest.approx(none["whole"])
        assert (row["loss"] == none["loss"]) == (arm == "none"), arm

    def measured(*_):
        pytest.fail("measured again")

    monkeypatch.setattr(study, "_measured", measured)
    assert study.study(material, [*arms.ARMS], LEVELS) == rows
    document = {"rows": rows, "table": "uniform", "rank": 2, "n_tokens": 256}
    assert "| 30 % | one nested adapter |" in report(document)
    table = TABLES["elastic-recovery"]([document])
    assert len(table.rows) == len(LEVELS) * len(arms.ARMS)
    plots.draw(rows, material.folder)
    assert (material.folder / "elastic-recovery.png").stat().st_size


def test_a_run_that_was_stopped_goes_on(material, monkeypatch):
    expected = study.study(material, ["KL"], [0.5])
    for path in material.folder.iterdir():
        path.unlink()
    advance, left = study.learned, [2]

    def stopped(*args):
        *rest, progress = args

        def step(n, loss):
            progress(n, loss)
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt

        return advance(*rest, step)

    monkeypatch.setattr(study, "learned", stopped)
    with pytest.raises(KeyboardInterrupt):
        study.study(material, ["KL"], [0.5])
    assert [path.suffix for path in material.folder.iterdir()] == [".npz"]
    monkeypatch.setattr(study, "learned", advance)
    again = study.study(material, ["KL"], [0.5])
    assert [row["loss"] for row in again] == [row["loss"] for row in expected]
    assert [row["n_tokens"] for row in again] == [256, 256]


def test_only_norms_and_biases_are_trained_in_that_arm(prepared):
    teacher = student.Teacher(prepared)
    gains = arms.Gains(teacher, read_elastic(prepared).tables["uniform"][5])
    names = {name.split(":")[1] for name in gains.arrays()}
    assert names == {
        "attn_norm/weight", "ffn_norm/weight", "attn_output/bias", "ffn_down/bias",
    }  # fmt: skip
    level = student.Level(teacher, gains.widths, 1)
    tokens = torch.from_numpy(WINDOWS[:2])
    torch.testing.assert_close(gains(tokens), level(tokens))  # nothing has changed yet


def test_a_nested_adapter_is_cut_to_each_level(prepared):
    teacher, table = student.Teacher(prepared), read_elastic(prepared).tables["uniform"]
    nested = arms.Nested(teacher, table[3:7], 2, 0)
    torch.nn.init.normal_(nested.whole.adapters["0:ffn_down:b"])
    part = nested.at(table[5])
    a, b = part.pair(0, "ffn_down")
    n = int(table[5].neurons[0])
    assert torch.equal(a, nested.whole.adapters["0:ffn_down:a"][:, :n])
    assert torch.equal(b, nested.whole.adapters["0:ffn_down:b"])
    outputs = nested(torch.from_numpy(WINDOWS[:2]))
    assert outputs.shape[0] == 4
    torch.testing.assert_close(outputs[-1], nested.at(table[6])(torch.from_numpy(WINDOWS[:2])))
    outputs.sum().backward()
    assert nested.whole.adapters["0:ffn_down:a"].grad.abs().sum() > 0


def test_closure_is_the_share_of_the_gap_that_is_won_back():
    base = {"loss": [3.0, 4.0], "whole": [2.0, 2.0]}
    found = closure({"loss": [2.5, 3.0], "whole": [2.0, 2.0]}, base)
    assert found.value == pytest.approx(0.5)
    assert found.low <= 0.5 <= found.high
    assert closure(base, {"loss": [2.0], "whole": [2.0]}) is None


def row_of(level, arm, n_tokens, loss, kind="own"):
    """Return a row of the study, on two windows."""
    losses = [loss, loss + 0.1]
    names = {"level": level, "arm": arm, "n_tokens": n_tokens, "kind": kind}
    return names | {"loss": losses, "whole": [2.0, 2.1], "kl": [loss - 2, loss - 2]}


def test_runs_of_an_arm_with_more_tokens_have_lines_of_their_own():
    first = {"rows": [row_of(0.5, "none", 0, 3.0), row_of(0.5, "KL", 256, 2.6)]}
    table = TABLES["elastic-recovery"]([first, {"rows": [row_of(0.5, "KL", 1024, 2.5)]}])
    assert [line[1:3] + line[4:] for line in table.rows] == [
        ["none", "0", ""], ["KL", "256", "40 %"], ["KL", "1,024", "50 %"],
    ]  # fmt: skip


def test_orders_are_compared_by_the_arms_of_both():
    ours = [row_of(0.5, "none", 0, 3.0), row_of(0.5, "KL", 256, 2.6), row_of(0.5, "more", 256, 2)]
    theirs = [row_of(0.5, "none", 0, 4.0), row_of(0.5, "KL", 256, 3.0)]
    table = TABLES["elastic-recovery-orders"](
        [{"order": "fluctuation", "rows": ours}, {"order": "LLM-Pruner", "rows": theirs}]
    )
    assert [list(line) for line in table.rows] == [
        ["50 %", "fluctuation", "none", "1.000", "2.72"],
        ["50 %", "LLM-Pruner", "none", "2.000", "7.39"],
        ["50 %", "fluctuation", "KL", "0.600", "1.82"],
        ["50 %", "LLM-Pruner", "KL", "1.000", "2.72"],
    ]


def test_a_file_has_the_order_of_llm_pruner(tmp_path, capsys):
    model = write_family("llama", tmp_path / "model.gguf", weights=GGMLQuantizationType.F32)
    training = tmp_path / "data" / data.TRAINING_TEXT
    training.parent.mkdir(parents=True)
    text = "User: hello there, how are you?\nAssistant: fine.\n"
    training.write_bytes(lzma.compress(text.encode() * 4000))
    options = ["--model", str(model), "--out", str(tmp_path / "out.gguf")]
    options += ["--data", str(tmp_path / "data")]
    with pytest.raises(SystemExit, match="2"):
        llm_pruner.main(options)
    assert "llmaas elastic score" in capsys.readouterr().err
    own = random_scores(blocks_of(model), 0)
    layers = np.arange(len(own.groups), dtype=np.float64)
    write_scores(scores_path(model), replace(own, layers=layers), model)
    assert llm_pruner.main(options) == 0
    found = read_elastic(tmp_path / "out.gguf")
    assert found.calibration.method == "LLM-Pruner"
    assert list(found.tables) == ["uniform"]
