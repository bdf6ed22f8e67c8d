"""Recovery: adapters that make levels better, kept in the prepared file, from a command."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from damages import flip
from elastic_models import adapters_of, shuffled, write
from gguf import GGMLQuantizationType

from llmaas_eval.data import packaged_documents
from llmaas_eval.families import write_family
from llmaas_hooks import ConfigError
from llmaas_hooks.native.low_rank import LowRank
from llmaas_plugins.cli.elastic import recover as elastic_recover
from llmaas_plugins.cli.main import main
from llmaas_plugins.elastic.adapters import read_adapters, write_adapters
from llmaas_plugins.elastic.metadata import order_in, read_elastic
from llmaas_plugins.elastic.parts import COLUMNS, ROWS
from llmaas_plugins.elastic.prepared_file import write_prepared
from llmaas_plugins.elastic.units import blocks_of
from llmaas_plugins.model.gguf_header import read_header

torch = pytest.importorskip("torch", reason="make test-train installs it")
costs = pytest.importorskip("llmaas_plugins.training.costs")
recovery = pytest.importorskip("llmaas_plugins.training.recovery")
student = pytest.importorskip("llmaas_plugins.training.student")
trainer = pytest.importorskip("llmaas_plugins.training.trainer")

WINDOWS = np.random.default_rng(0).integers(3, 4000, (8, 32), np.int32)
RECIPE = recovery.Recipe(n_tokens=1024)
LEVEL = 5


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recovery")
    source = write_family("llama", folder / "model.gguf", weights=GGMLQuantizationType.F32)
    return shuffled(source, folder / "model.elastic.gguf")


@pytest.fixture(scope="module")
def trained(reference_model, tmp_path_factory):
    """Prepare the packaged model with random scores, and write a text for it."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text("\n".join(packaged_documents())[:14_000])
    return shuffled(reference_model, folder / "model.elastic.gguf")


@pytest.fixture
def model(trained, tmp_path):
    shutil.copy(trained.with_name("text.txt"), tmp_path)
    return shutil.copy(trained, tmp_path / "model.elastic.gguf")


def level_of(path, index=LEVEL, rank=4):
    return student.Level(student.Teacher(path), read_elastic(path).tables["uniform"][index], rank)


# -- a level -------------------------------------------------------------------------------------


def test_the_adapter_of_an_outcome_is_what_was_judged(prepared):
    texts = recovery.Texts(WINDOWS, WINDOWS)  # noise teaches nothing about other noise
    done, level = [], level_of(prepared)
    found = recovery.recover(level, texts, RECIPE, progress=done.append)
    assert sum(done) == RECIPE.n_steps(32) * 2 * 32
    assert found.is_better
    assert found.after.kl < found.before.kl
    assert found.before.whole == found.after.whole
    again = level_of(prepared)
    arrays = {}
    for weight, one in found.adapters.items():
        _, layer, name, _ = weight.split(".")
        n_in, n_out = student.dimensions_of(level.teacher.blocks, level.widths, int(layer), name)
        assert not one.a[:, n_in:].any()
        assert not one.b[n_out:].any()
        arrays |= {f"{layer}:{name}:a": one.a[:, :n_in], f"{layer}:{name}:b": one.b[:n_out]}
    again.load(arrays)
    judged = np.mean(recovery.judge(again, texts.held_out), axis=0)
    np.testing.assert_allclose(judged, found.after, rtol=1e-5)


def test_levels_that_cut_keys_and_values_learn_as_others_of_their_widths(prepared, tmp_path):
    cut, order = tmp_path / "cut.gguf", order_in(read_header(prepared), blocks_of(prepared))
    source = prepared.with_name("model.gguf")
    elastic = replace(read_elastic(prepared), blocks=blocks_of(source, cuts_keys_values=True))
    write(write_prepared(source, cut, elastic, order))
    texts = recovery.Texts(WINDOWS, WINDOWS)
    recipe = recovery.Recipe(n_tokens=64)
    found, other = (recovery.recover(level_of(path), texts, recipe) for path in (prepared, cut))
    assert read_elastic(cut).blocks.cuts_keys_values
    assert found.before == other.before
    for weight, one in found.adapters.items():
        np.testing.assert_array_equal(one.b, other.adapters[weight].b)
    write(write_adapters(cut, "uniform", {LEVEL: other.adapters}))
    assert read_adapters(cut, read_elastic(cut), "uniform")[LEVEL].keys() == found.adapters.keys()


def test_closure_is_the_share_of_the_gap_that_is_won_back():
    before, after = recovery.Quality(0.5, 3.0, 2.0), recovery.Quality(0.2, 2.6, 2.0)
    assert recovery.Outcome(before, after, True, {}).closure == pytest.approx(0.4)
    nothing = recovery.Quality(0.5, 2.0, 2.0)  # a text that the whole model predicts no better
    assert recovery.Outcome(nothing, after, True, {}).closure is None


def test_the_last_windows_are_held_out():
    for n, n_held_out in ((2, 1), (10, 5), (24, 8), (160, 20), (1000, 64)):
        windows = np.arange(n, dtype=np.int32)[:, None]
        texts = recovery.split(windows)
        assert len(texts.held_out) == n_held_out
        assert np.array_equal(np.concatenate(texts), windows)
    assert recovery.text_tokens(70_000, 512) == 80_000
    assert recovery.text_tokens(512, 512) == 9 * 512
    with pytest.raises(ConfigError, match="fills 1 windows of 32 tokens, expected 2"):
        recovery.split(WINDOWS[:1])


def test_an_adapter_that_does_not_help_is_not_better(prepared):
    useless = replace(RECIPE, rate=0.0, is_fitted=False)
    found = recovery.recover(level_of(prepared), recovery.split(WINDOWS), useless)
    assert found.before == found.after
    assert not found.is_better


def test_an_adapter_that_helps_by_chance_only_is_not_better():
    quality = objectives_quality(0.5)
    before = [quality, quality]
    by_chance = [objectives_quality(0.1), objectives_quality(0.8)]
    assert not recovery._outcome(before, by_chance, RECIPE, {}).is_better
    assert recovery._outcome(before, [objectives_quality(0.4)] * 2, RECIPE, {}).is_better


def test_an_adapter_that_is_no_better_than_the_older_one_is_not_better(prepared):
    texts, short = recovery.Texts(WINDOWS, WINDOWS), replace(RECIPE, n_tokens=64)
    older = level_of(prepared)
    first = recovery.recover(older, texts, RECIPE)
    assert recovery.recover(level_of(prepared), texts, short).is_better
    found = recovery.recover(level_of(prepared), texts, short, older=older)
    assert found.older == first.after
    assert not found.is_better
    better = recovery.Quality(0.0, 3.0, 3.0)
    before, middle = ([objectives_quality(kl)] * 2 for kl in (0.5, 0.4))
    assert recovery._outcome(before, [better] * 2, RECIPE, {}, middle).is_better


def test_a_level_can_use_a_stored_adapter_of_another_rank(prepared):
    level = level_of(prepared, rank=2)
    given = adapters_of(level.teacher.blocks, [LEVEL], rank=3)[LEVEL]
    name = "blk.0.attn_q.weight"
    n_in, n_out = student.dimensions_of(level.teacher.blocks, level.widths, 0, "attn_q")
    stored = LowRank.of(given[name].a[:, :n_in], given[name].b[:n_out])
    level.put({name: stored})
    for found, expected in zip(level.pair(0, "attn_q"), stored.floats(), strict=True):
        np.testing.assert_array_equal(found.detach().numpy(), expected)
    assert not level.pair(0, "ffn_down")[1].any()


def objectives_quality(kl):
    return recovery.Quality(kl, 3.0 + kl, 3.0)


def test_a_run_depends_on_everything_that_it_is_made_of(prepared, trained):
    texts, widths = recovery.split(WINDOWS), read_elastic(prepared).tables["uniform"]
    of = recovery.run_identity
    found = {
        of(prepared, widths[LEVEL], texts, RECIPE),
        of(trained, widths[LEVEL], texts, RECIPE),
        of(prepared, widths[LEVEL + 1], texts, RECIPE),
        of(prepared, widths[LEVEL], recovery.split(WINDOWS + 1), RECIPE),
        of(prepared, widths[LEVEL], texts, replace(RECIPE, seed=1)),
        of(prepared, widths[LEVEL], texts, RECIPE, {"blk.0.ffn_down.weight": np.zeros(4, "f4")}),
        of(prepared, widths[LEVEL], texts, RECIPE, {"blk.0.ffn_down.weight": np.ones(4, "f4")}),
    }
    assert len(found) == 7


def test_adapters_in_the_file_do_not_change_a_runs_identity(prepared, tmp_path):
    path = shutil.copy(prepared, tmp_path / "model.gguf")
    texts, widths = recovery.split(WINDOWS), read_elastic(prepared).tables["uniform"][LEVEL]
    before = recovery.run_identity(path, widths, texts, RECIPE)
    found = recovery.recover(level_of(path), texts, RECIPE)
    write(write_adapters(path, "uniform", {LEVEL: found.adapters}))
    assert recovery.run_identity(path, widths, texts, RECIPE) == before


@pytest.mark.parametrize("is_kept", [True, False])
def test_costs_are_estimated(prepared, is_kept):
    teacher = student.Teacher(prepared, is_kept=is_kept)
    widths = read_elastic(prepared).tables["uniform"][LEVEL]
    level = student.Level(teacher, widths, 4)
    assert costs.level_seconds(level, recovery.split(WINDOWS), RECIPE) > 0
    assert all(parameter.grad is None for parameter in level.parameters())
    small, large = (costs.memory_bytes(prepared, teacher, RECIPE, n) for n in (32, 512))
    assert small < large < 4 << 30


def test_the_first_step_of_a_process_is_not_measured(monkeypatch):
    seen, now = [], [0.0]

    class Module(torch.nn.Linear):
        def forward(self, windows):
            seen.append(tuple(windows.shape))
            now[0] += 100 if len(seen) == 1 else 1
            return super().forward(windows[..., None].float())

    def objective(outputs, _windows):
        return 0.0, torch.ones_like(outputs)

    monkeypatch.setattr(costs, "time", SimpleNamespace(monotonic=lambda: now[0]))
    module, windows = Module(1, 1), np.zeros((2, 512), np.int32)
    assert costs.step_seconds(module, objective, windows, n_prompt=64) == 1
    assert seen == [(1, 96), (2, 511)]
    assert module.weight.grad is None


# -- the command ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_writes_adapters_that_help(model, capfd):
    text = model.with_name("text.txt")
    options = ["--quick", "--tokens", "3072", "--levels", "0.4,0.3", "--text", str(text)]
    assert main(["elastic", "recover", str(model), *options, "--json"]) == 0
    printed, shown = capfd.readouterr()
    report = json.loads(printed)
    assert report["table"] == "uniform"
    assert [row["level"] for row in report["levels"]] == [0.4, 0.3]
    for row in report["levels"]:
        assert row["is_written"]
        assert row["kl"] < row["kl_before"]
        assert row["perplexity_whole"] < row["perplexity"] < row["perplexity_before"]
        assert 0 < row["closure"] < 1
    elastic = read_elastic(model)
    found = read_adapters(model, elastic, "uniform")
    assert [elastic.levels[index] for index in found] == [0.4, 0.3]
    names = {f"blk.{i}.{one}.weight" for i in range(8) for one in (*ROWS, *COLUMNS)}
    assert all(weights.keys() == names for weights in found.values())
    assert {one.rank for weights in found.values() for one in weights.values()} == {8}
    assert not model.with_name("model.elastic.gguf.recovery").exists()
    assert not shown

    # another level leaves the first ones there, and nothing is written that does not help
    more = ["--tokens", "2048", "--levels", "0.2", "--text", str(text), "--rank", "2"]
    assert main(["elastic", "recover", str(model), *more]) == 0
    printed, _ = capfd.readouterr()
    assert "memory: about" in printed
    assert "time: about" in printed
    assert "written" in printed
    again = read_adapters(model, read_elastic(model), "uniform")
    assert {elastic.levels[index] for index in again} >= {0.4, 0.3}
    for index, weights in found.items():
        for name, one in weights.items():
            np.testing.assert_allclose(again[index][name].floats()[0], one.floats()[0], atol=1e-2)


class Bar:
    """Progress bar that sends Ctrl-C at one of its updates."""

    def __init__(self, n_updates):
        self.seen, self._n_left = [], n_updates

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def update(self, n):
        self.seen.append(n)
        self._n_left -= 1
        if self._n_left == 0:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_learned(model, monkeypatch, capfd):
    text, folder = model.with_name("text.txt"), model.with_name("model.elastic.gguf.recovery")
    command = ["elastic", "recover", str(model), "--tokens", "2048", "--levels", "0.3"]
    bars = [Bar(2), Bar(0), Bar(0)]  # one level, the same level again, and writing
    monkeypatch.setattr(elastic_recover, "progress_bar", lambda *_: bars.pop(0))
    assert main([*command, "--text", str(text)]) == 130
    printed, said = capfd.readouterr()
    assert said == f"llmaas: stopped; progress is kept in {folder}; the same command goes on\n"
    assert printed.startswith("device: ")
    assert not read_elastic(model).adapters
    again = bars[0]
    assert main([*command, "--text", str(text)]) == 0
    assert again.seen[0] == 2 * 512  # one step was done before Ctrl-C
    assert sum(again.seen) == 2048
    assert not folder.exists()


@pytest.fixture
def quickly(model, monkeypatch):
    """Return a command that learns nothing, and the list of what is done instead."""
    done, blocks = [], read_elastic(model).blocks

    def learned(*_):
        is_better = all(each() is not False for each in done)
        quality = objectives_quality(0.5)
        return recovery.Outcome(quality, quality, is_better, adapters_of(blocks, [LEVEL])[LEVEL])

    monkeypatch.setattr(elastic_recover, "_learned", learned)
    monkeypatch.setattr(elastic_recover, "_say_time", lambda _job: None)
    text = str(model.with_name("text.txt"))
    return ["elastic", "recover", str(model), "--levels", "0.3", "--text", text], done


def test_other_runs_and_other_files_stay(model, quickly):
    folder = model.with_name("model.elastic.gguf.recovery")
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / "0.3-0123456789abcdef.npz").write_bytes(b"another run")
    command, done = quickly
    done.append(lambda: (folder / "text-123.progress").write_bytes(b"another run's"))
    assert main(command) == 0
    names = {each.name for each in folder.iterdir()}
    assert names == {"notes.txt", "0.3-0123456789abcdef.npz", "text-123.progress"}


def test_a_file_that_was_replaced_while_it_learned_stays(model, trained, quickly, capfd):
    command, done = quickly
    kept = model.with_name("model.elastic.gguf.recovery") / "kept.npz"

    def replaced():
        kept.touch()
        shutil.copy(trained, model.with_name("new")).replace(model)
        return True

    done.append(replaced)
    assert main(command) == 2
    assert "was replaced or changed while its adapters were learned" in capfd.readouterr().err
    assert model.read_bytes() == trained.read_bytes()
    assert kept.exists()


@pytest.mark.parametrize("is_better", [True, False])
def test_damaged_adapters_are_replaced(model, quickly, caplog, is_better):
    blocks = read_elastic(model).blocks
    write(write_adapters(model, "uniform", adapters_of(blocks, [LEVEL])))
    flip(model, model.stat().st_size - 1)
    command, done = quickly
    done.append(lambda: is_better)
    assert main(command) == 0
    (said,) = caplog.messages
    assert "are damaged or were learned for other widths; this command replaces them" in said
    found = read_adapters(model, read_elastic(model), "uniform")
    assert len(found) == is_better


def test_a_level_that_the_file_lacks_is_refused(model, capfd):
    assert main(["elastic", "recover", str(model), "--levels", "0.65"]) == 2
    assert "has no level 0.65 below 1, expected some of 0.9" in capfd.readouterr().err
    assert main(["elastic", "recover", str(model), "--table", "searched"]) == 2
    assert "has no table 'searched', expected one of uniform" in capfd.readouterr().err


def test_a_text_that_is_too_short_is_refused(model, capfd):
    short = model.with_name("short.txt")
    short.write_text("hello " * 20)
    assert main(["elastic", "recover", str(model), "--text", str(short)]) == 2
    assert "the text fills 1 windows of" in capfd.readouterr().err
