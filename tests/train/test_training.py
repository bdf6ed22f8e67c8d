"""The trainer: exact resumption, several processes as one, and losses that fit whole logits."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from elastic_models import shuffled
from gguf import GGMLQuantizationType

from llmaas_eval.families import write_family
from llmaas_hooks import ConfigError, StoreError
from llmaas_plugins.elastic.metadata import read_elastic

torch = pytest.importorskip("torch", reason="make test-train installs it")
torch_model = pytest.importorskip("llmaas_plugins.elastic.torch_model")
batches = pytest.importorskip("llmaas_plugins.training.batches")
checkpoint = pytest.importorskip("llmaas_plugins.training.checkpoint")
closed_form = pytest.importorskip("llmaas_plugins.training.closed_form")
objectives = pytest.importorskip("llmaas_plugins.training.objectives")
student = pytest.importorskip("llmaas_plugins.training.student")
trainer = pytest.importorskip("llmaas_plugins.training.trainer")
workers = pytest.importorskip("llmaas_plugins.training.workers")

WINDOWS = np.random.default_rng(0).integers(3, 4000, (8, 24), np.int32)
SETTINGS = trainer.Settings(6, 1e-2)
IDENTITY = "0" * 64
LEVEL = 5


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("training")
    source = write_family("qwen2", folder / "model.gguf", weights=GGMLQuantizationType.F32)
    return shuffled(source, folder / "model.elastic.gguf")


def level_of(path, *, is_kept=True, rank=4):
    teacher = student.Teacher(path, is_kept=is_kept)
    return student.Level(teacher, read_elastic(path).tables["uniform"][LEVEL], rank)


def learn(level, kept=None, progress=lambda *_: None, settings=SETTINGS, loss="kl"):
    objective = objectives.Objective(level.teacher, loss)
    trainer.train(
        level, objective, batches.Batches(WINDOWS, 2, 0), settings, kept=kept, progress=progress
    )
    return level.arrays()


def check_same(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, **tolerance, err_msg=name)


# -- the student ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_a_level_computes_what_gates_compute(tmp_path, family):
    source = write_family(family, tmp_path / "model.gguf", weights=GGMLQuantizationType.F32)
    level = level_of(shuffled(source, tmp_path / "prepared.gguf"))
    decoder = torch_model.Decoder(tmp_path / "prepared.gguf")
    with torch.no_grad():
        found = level(torch.from_numpy(WINDOWS))
    expected = decoder.run(WINDOWS, torch_model.gates_of(level.widths, decoder))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_an_adapter_adds_b_a_x(prepared):
    level = level_of(prepared)
    weights = level.weights(0)
    for part in "ab":
        torch.nn.init.normal_(level.adapters[f"0:ffn_down:{part}"])
    x = torch.randn(3, weights["ffn_down.weight"].shape[1])
    a, b = level.adapters["0:ffn_down:a"], level.adapters["0:ffn_down:b"]
    expected = x @ weights["ffn_down.weight"].t() + x @ a.t() @ b.t()
    torch.testing.assert_close(level.teacher.product(0, weights, "ffn_down", x), expected)


def test_a_bias_of_a_level_is_added(prepared):
    level = level_of(prepared)
    bias = np.full(level.teacher.blocks.n_embd, 0.5, np.float32)
    biased = student.Level(level.teacher, level.widths, 4, biases={"blk.1.ffn_down.weight": bias})
    x = torch.randn(2, 5, level.teacher.blocks.n_embd)
    with torch.no_grad():
        torch.testing.assert_close(biased.apply_layer(0, x), level.apply_layer(0, x))
        torch.testing.assert_close(biased.apply_layer(1, x), level.apply_layer(1, x) + 0.5)


def test_layers_read_one_by_one_have_the_same_gradients(prepared):
    kept, read = level_of(prepared), level_of(prepared, is_kept=False)
    check_same(learn(read), learn(kept), rtol=1e-4, atol=1e-6)
    assert not read.teacher._layers


# -- losses --------------------------------------------------------------------------------------


def test_losses_and_gradients_are_those_of_whole_logits(prepared, monkeypatch):
    level = level_of(prepared)
    decoder, targets = level.teacher, torch.from_numpy(WINDOWS[:, 1:].astype(np.int64)).flatten()
    outputs = level(torch.from_numpy(WINDOWS[:, :-1])).detach().requires_grad_()
    logs = torch.log_softmax(decoder.logits(outputs.flatten(0, 1)), -1)
    with torch.no_grad():
        whole = torch.log_softmax(decoder.logits(decoder.run(WINDOWS[:, :-1]).flatten(0, 1)), -1)
    expected = {
        "kl": (whole.exp() * (whole - logs)).sum(-1).mean(),
        "next-token": -logs.gather(-1, targets[:, None]).mean(),
    }
    monkeypatch.setattr(objectives, "MOST_LOGITS", 7 * decoder.n_vocab)  # 7 positions at a time
    for name, loss in expected.items():
        (gradient,) = torch.autograd.grad(loss, outputs, retain_graph=True)
        found, found_gradient = objectives.Objective(decoder, name)(outputs, WINDOWS)
        assert found == pytest.approx(loss.item(), rel=1e-4)
        torch.testing.assert_close(found_gradient, gradient, rtol=1e-3, atol=1e-7)
    judged = np.mean(objectives.qualities(decoder, outputs.detach(), WINDOWS), axis=0)
    real = -whole.gather(-1, targets[:, None]).mean().item()
    assert judged == pytest.approx([expected["kl"].item(), expected["next-token"].item(), real])


@pytest.mark.parametrize("loss", ["kl", "next-token"])
def test_training_lowers_its_loss(prepared, loss):
    seen = []
    learn(
        level_of(prepared),
        None,
        lambda _n, found: seen.append(found),
        trainer.Settings(24, 1e-2),
        loss,
    )
    assert np.mean(seen[-4:]) < 0.9 * np.mean(seen[1:5])


def test_the_closed_form_brings_a_level_nearer(prepared):
    level = level_of(prepared, rank=32)

    def distance():
        with torch.no_grad():
            part = level(torch.from_numpy(WINDOWS))
        return float((part - level.teacher.run(WINDOWS)).norm())

    before, done = distance(), []
    closed_form.fit(level, np.concatenate([WINDOWS, WINDOWS]), done.append)
    assert distance() < 0.9 * before
    assert len(done) == level.teacher.blocks.n_layers


def test_the_closed_form_finds_what_is_there_and_leaves_noise_alone():
    chance = torch.Generator().manual_seed(0)
    x = torch.randn(8, 64, 40, generator=chance)
    start = torch.randn(4, 40, generator=chance)
    rows, columns = (torch.randn(3, n, generator=chance) for n in (40, 50))
    real = x @ rows.t() @ columns
    a, b = closed_form._regressed(x, real, start)
    assert float((x @ a.t() @ b.t() - real).norm() / real.norm()) < 0.4  # shrunk by the ridge
    noise = torch.randn(8, 64, 50, generator=chance)
    start = torch.randn(16, 40, generator=chance)
    a, b = closed_form._regressed(x, noise, start)
    assert float((x @ a.t() @ b.t()).norm() / noise.norm()) < 0.1
    unused = (b == 0).all(0)
    assert unused.any()
    assert torch.equal(a[unused], start[unused])


# -- the order of windows ------------------------------------------------------------------------


def test_all_windows_are_used_before_one_is_used_again():
    alone = batches.Batches(WINDOWS, 4, seed=3)
    for turn in range(2):
        rows = np.concatenate([alone.at(2 * turn), alone.at(2 * turn + 1)])
        assert sorted(map(tuple, rows)) == sorted(map(tuple, WINDOWS))
    assert not np.array_equal(alone.at(0), alone.at(2))


def test_workers_share_a_batch():
    alone = batches.Batches(WINDOWS, 4, seed=3)
    shares = [batches.Batches(WINDOWS, 4, 3, workers.Workers(rank, 2)).at(1) for rank in range(2)]
    assert sorted(map(tuple, np.concatenate(shares))) == sorted(map(tuple, alone.at(1)))
    with pytest.raises(ConfigError, match="3 processes cannot share batches of 4"):
        batches.Batches(WINDOWS, 4, 0, workers.Workers(0, 3))


# -- going on ------------------------------------------------------------------------------------


class StopError(Exception):
    """End of a run before its time."""


@pytest.mark.parametrize("n_done", [1, 4])
def test_a_run_that_was_stopped_ends_with_the_same_weights(prepared, tmp_path, n_done):
    expected = learn(level_of(prepared))
    kept, left = trainer.Kept(tmp_path / "run.npz", IDENTITY), [n_done + 1]

    def stop(*_):
        left[0] -= 1
        if left[0] < 0:
            raise StopError

    left[0] -= 1  # the call at the beginning
    with pytest.raises(StopError):
        learn(level_of(prepared), kept, stop)
    done = []
    found = learn(level_of(prepared), kept, lambda n, _loss: done.append(n))
    assert done[0] == n_done * 2 * WINDOWS.shape[1]
    assert len(done) == 1 + SETTINGS.n_steps - n_done
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)
    again = []
    learn(level_of(prepared), kept, lambda n, _loss: again.append(n))
    assert again == [sum(done)]  # nothing is left to do


def test_checkpoints_are_written_while_it_runs(prepared, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "_WRITING_RATIO", 0)
    kept, steps = trainer.Kept(tmp_path / "run.npz", IDENTITY, every_s=0.0), []
    shapes = {name: tuple(each.shape) for name, each in level_of(prepared).named_parameters()}
    shapes |= {f"{name}|{m}": s for name, s in shapes.items() for m in ("exp_avg", "exp_avg_sq")}

    def look(*_):
        found = checkpoint.read_checkpoint(kept.path, IDENTITY, shapes)
        steps.append(found.step if found else 0)

    learn(level_of(prepared), kept, look)
    assert steps == list(range(SETTINGS.n_steps + 1))


def test_checkpoints_take_a_small_share_of_the_time(prepared, tmp_path, monkeypatch):
    now, steps = [0.0], []

    def write(_path, _identity, found):
        now[0] += 2
        steps.append(found.step)

    monkeypatch.setattr(trainer, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(trainer, "write_checkpoint", write)

    def progress(n, loss):
        now[0] += 15 * (not np.isnan(loss))

    kept = trainer.Kept(tmp_path / "run.npz", IDENTITY, every_s=14)
    learn(level_of(prepared), kept, progress, replace(SETTINGS, n_steps=9))
    assert steps == [2, 5, 8, 9]  # one that takes 2 s is written every 40 s


def test_a_run_that_diverges_keeps_what_was_finite(prepared, tmp_path, monkeypatch):
    kept, real = trainer.Kept(tmp_path / "run.npz", IDENTITY), objectives.Objective.__call__
    calls = []

    def diverges(*args):
        calls.append(args)
        loss, gradient = real(*args)
        return loss, gradient * (float("inf") if len(calls) == 3 else 1)

    monkeypatch.setattr(objectives.Objective, "__call__", diverges)
    with pytest.raises(ConfigError, match=r"learning diverged at step 3: .* is nan, expected"):
        learn(level_of(prepared), kept)
    done = []
    learn(level_of(prepared), kept, lambda n, _loss: done.append(n))
    assert done[0] == 2 * 2 * WINDOWS.shape[1]


ARRAYS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.float32)}
SHAPES = {name: array.shape for name, array in ARRAYS.items()}


def test_a_checkpoint_comes_back(tmp_path):
    path = tmp_path / "run.npz"
    assert checkpoint.read_checkpoint(path, IDENTITY, SHAPES) is None
    checkpoint.write_checkpoint(path, IDENTITY, checkpoint.Checkpoint(7, ARRAYS))
    found = checkpoint.read_checkpoint(path, IDENTITY, SHAPES)
    assert found.step == 7
    check_same(found.arrays, ARRAYS)
    assert [each.name for each in tmp_path.iterdir()] == ["run.npz"]


def pickled(path):
    np.savez(path, about=np.array([{}], object), **ARRAYS)


def changed(path):
    content = bytearray(path.read_bytes())
    at = content.index(ARRAYS["a"].tobytes())
    content[at] ^= 1
    path.write_bytes(content)


def changed_with_its_crc(path):
    with np.load(path) as file:
        arrays = dict(file)
    arrays["a"] = arrays["a"] + 1
    np.savez(path, **arrays)


def huge(path):
    np.savez(path, about=np.zeros(10, np.uint8), a=np.zeros((200, 300), np.float32), b=ARRAYS["b"])


def not_finite(path):
    checkpoint.write_checkpoint(
        path, IDENTITY, checkpoint.Checkpoint(1, {**ARRAYS, "b": np.full(4, np.nan, "f4")})
    )


def of_other_arrays(path):
    arrays = {"other": ARRAYS["b"]}
    checkpoint.write_checkpoint(path, IDENTITY, checkpoint.Checkpoint(1, arrays))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (pickled, "Remove it"),
        (changed, "Remove it"),
        (changed_with_its_crc, "checksum"),
        (huge, "expected at most 40"),
        (not_finite, "finite"),
        (lambda path: path.write_bytes(b"PK"), "Remove it"),
        (of_other_arrays, "its arrays are"),
    ],
)
def test_a_damaged_checkpoint_is_refused(tmp_path, damage, reason):
    path = tmp_path / "run.npz"
    checkpoint.write_checkpoint(path, IDENTITY, checkpoint.Checkpoint(7, ARRAYS))
    damage(path)
    with pytest.raises(ConfigError, match=reason):
        checkpoint.read_checkpoint(path, IDENTITY, SHAPES)


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    checkpoint.write_checkpoint(tmp_path / "run.npz", IDENTITY, checkpoint.Checkpoint(7, ARRAYS))
    with pytest.raises(ConfigError, match="other settings"):
        checkpoint.read_checkpoint(tmp_path / "run.npz", "1" * 64, SHAPES)


def test_a_full_disk_is_reported(tmp_path):
    with pytest.raises(StoreError, match="cannot write"):
        checkpoint.write_checkpoint(
            tmp_path / "none" / "run.npz", IDENTITY, checkpoint.Checkpoint(7, ARRAYS)
        )


# -- several processes ---------------------------------------------------------------------------

WORKER = """
import sys
sys.path[:0] = [sys.argv[3], sys.argv[3] + "/../support"]
import numpy as np, torch
import test_training as t
torch.set_num_threads(1)
with t.workers.workers() as group:
    level = t.level_of(t.Path(sys.argv[1]))
    if not group.is_first:
        torch.nn.init.normal_(level.adapters["0:ffn_down:b"])  # the first worker's weights count
    windows = group.shared(t.WINDOWS if group.is_first else None)
    path = t.Path(sys.argv[2]) / f"{group.rank}.npz"
    kept = t.trainer.Kept(path, t.IDENTITY)
    for n_steps in (3, t.SETTINGS.n_steps):
        objective, done = t.objectives.Objective(level.teacher), []
        def stop(n, _loss):
            done.append(n)
            if n_steps == len(done) - 1:
                raise t.StopError
        try:
            t.trainer.train(level, objective, t.batches.Batches(windows, 2, 0, group),
                            t.SETTINGS, workers=group, kept=kept, progress=stop)
        except t.StopError:
            pass
    np.savez(t.Path(sys.argv[2]) / f"result-{group.rank}.npz", **level.arrays())
"""


@pytest.mark.slow
def test_two_processes_learn_what_one_learns(prepared, tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    arguments = [tmp_path / "worker.py", prepared, tmp_path, Path(__file__).parent]
    done = subprocess.run([*run, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    expected = learn(level_of(prepared))
    for rank in range(2):
        with np.load(tmp_path / f"result-{rank}.npz") as file:
            check_same(dict(file), expected, rtol=2e-2, atol=2e-4)
    assert (tmp_path / "0.npz").exists()
    assert not (tmp_path / "1.npz").exists()  # only the first worker writes
