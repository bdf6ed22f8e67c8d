"""Learning on a GPU: it computes what the processor computes, and continues what that began."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from elastic_models import shuffled
from flash_models import tensors_of

from llmaas_plugins.elastic.metadata import read_elastic
from llmaas_plugins.flash_weights.channel_layout import channel_operands

torch = pytest.importorskip("torch", reason="make test-train installs it")
costs = pytest.importorskip("llmaas_plugins.training.costs")
device = pytest.importorskip("llmaas_plugins.training.device")
distillation = pytest.importorskip("llmaas_plugins.training.distillation")
growth = pytest.importorskip("llmaas_plugins.training.loss_growth")
objectives = pytest.importorskip("llmaas_plugins.training.objectives")
recovery = pytest.importorskip("llmaas_plugins.training.recovery")
sparse_student = pytest.importorskip("llmaas_plugins.training.sparse_student")
student = pytest.importorskip("llmaas_plugins.training.student")
trainer = pytest.importorskip("llmaas_plugins.training.trainer")

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no GPU to use")

CPU = torch.device("cpu")
WINDOWS = np.random.default_rng(0).integers(3, 4000, (8, 64), np.int32)
RECIPE = distillation.SparseRecipe(4 * 64, n_prompt=16, n_rows=1)


@pytest.fixture
def use(monkeypatch):
    """Return a function that makes models compute on a device."""
    return lambda one: monkeypatch.setattr(student, "learning_device", lambda: one)


@pytest.fixture(scope="module")
def operands(reference_model):
    return channel_operands(tensors_of(reference_model))


@pytest.fixture
def distilled(reference_model, operands):
    """Return a function that distills some steps, and returns the student."""

    def distill(recipe, **options):
        grids = sparse_student.grids_in(reference_model, operands, tensors_of(reference_model))
        one = sparse_student.SparseStudent(sparse_student.MaskedTeacher(reference_model), grids)
        if recipe.n_tokens:
            distillation.distill(one, WINDOWS[:2], recipe, **options)
        return one

    return distill


def far(found, expected):
    """Return the norm of the difference of two arrays, relative to that of the second."""
    found, expected = (torch.as_tensor(each).detach().cpu().double() for each in (found, expected))
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_an_empty_list_of_gpus_turns_them_off(hidden):
    code = "from llmaas_plugins.training.device import learning_device; print(learning_device())"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": hidden},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == "cpu\n"


def test_the_processors_memory_is_the_machines():
    assert 0 < device.used_bytes(CPU) < device.free_bytes(CPU)
    assert device.device_name(CPU)


@on_gpu
def test_a_gpu_has_memory_and_a_name():
    gpu = device.learning_device()
    assert gpu.type == "cuda"
    assert device.device_name(gpu)
    before = device.used_bytes(gpu)
    kept = torch.zeros(1 << 20, device=gpu)
    assert device.used_bytes(gpu) - before >= 4 * kept.numel()
    assert device.used_bytes(gpu) < device.free_bytes(gpu)


@on_gpu
def test_a_sparse_step_has_the_same_outputs_and_gradients(use, distilled):
    found = []
    for one in (CPU, device.learning_device()):
        use(one)
        sparse = distilled(replace(RECIPE, n_tokens=0))
        assert {each.device for each in sparse.parameters()} == {one}
        sparse.teacher.mask = sparse_student.Mask(0.5, 16)
        outputs = sparse(torch.from_numpy(WINDOWS[:2, :-1]))
        loss, gradient = objectives.Objective(sparse.teacher, "kl", 16)(outputs, WINDOWS[:2])
        outputs.backward(gradient)
        gradients = torch.cat([each.grad.flatten() for each in sparse.parameters()])
        found.append((loss, outputs, gradients))
    (loss, outputs, gradients), (loss_gpu, outputs_gpu, gradients_gpu) = found
    assert loss_gpu == pytest.approx(loss, rel=1e-3)
    # a value at the edge of a mask may fall on the other side
    assert far(outputs_gpu, outputs) < 1e-2
    assert far(gradients_gpu, gradients) < 3e-2


@on_gpu
def test_distillation_goes_on_on_the_other_device(use, distilled, tmp_path):
    kept = trainer.Kept(tmp_path / "run.npz", "0" * 64)

    class StoppedError(Exception):
        pass

    def stop(n):
        if n == 64 and stop.left == 0:
            raise StoppedError
        stop.left -= n == 64

    use(CPU)
    expected = distilled(RECIPE)
    for first in (CPU, device.learning_device()):
        stop.left = 1
        use(first)
        with pytest.raises(StoppedError):
            distilled(RECIPE, kept=kept, progress=stop)
        use(device.learning_device() if first == CPU else CPU)
        found = distilled(RECIPE, kept=kept)
        kept.path.unlink()
        start = distilled(replace(RECIPE, n_tokens=0))
        for name in found.names:
            values = [each.grid(name).values for each in (found, expected, start)]
            assert far(values[0], values[1]) < 0.1 * far(values[2], values[1]) + 1e-3


@on_gpu
def test_shares_are_measured_alike(use, reference_model, operands):
    found = []
    for one in (CPU, device.learning_device()):
        use(one)
        teacher = sparse_student.MaskedTeacher(reference_model)
        found.append(growth.loss_growth(teacher, list(WINDOWS), operands))
    for operand in operands:
        assert far(found[1][operand], found[0][operand]) < 2e-2


@on_gpu
def test_an_adapter_is_learned_alike(use, reference_model, tmp_path):
    path = shuffled(reference_model, tmp_path / "model.elastic.gguf")
    widths = read_elastic(path).tables["uniform"][5]
    texts, recipe = recovery.Texts(WINDOWS, WINDOWS), recovery.Recipe(4 * 2 * 64, rate=1e-3)
    found = []
    for one in (CPU, device.learning_device()):
        use(one)
        level = student.Level(student.Teacher(path), widths, 4)
        found.append(recovery.recover(level, texts, recipe))
    for quality in ("before", "after"):
        kl = [getattr(each, quality).kl for each in found]
        assert kl[1] == pytest.approx(kl[0], rel=1e-2), quality
    assert found[0].after.kl < found[0].before.kl


@on_gpu
def test_a_step_is_timed_until_the_gpu_has_done_it(distilled):
    sparse = distilled(replace(RECIPE, n_tokens=0))
    sparse.teacher.mask = sparse_student.Mask(0.5, 16)
    objective = objectives.Objective(sparse.teacher, "kl", 16)
    assert costs.step_seconds(sparse, objective, WINDOWS[:2], 16) > 1e-3
