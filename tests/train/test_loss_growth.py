"""Growth of the loss where values are left out: by hand, and against the real loss."""

from __future__ import annotations

import numpy as np
import pytest
from flash_models import tensors_of

from llmaas_eval.data import packaged_documents
from llmaas_plugins.flash_weights.channel_layout import channel_operands
from llmaas_plugins.flash_weights.shares import GRID, cheapest_shares, equal_share

torch = pytest.importorskip("torch", reason="make test-train installs it")
distillation = pytest.importorskip("llmaas_plugins.training.distillation")
loss_growth = pytest.importorskip("llmaas_plugins.training.loss_growth")
sparse_student = pytest.importorskip("llmaas_plugins.training.sparse_student")

N = 128


@pytest.fixture(scope="module")
def teacher(reference_model):
    return sparse_student.MaskedTeacher(reference_model)


@pytest.fixture(scope="module")
def operands(reference_model):
    return channel_operands(tensors_of(reference_model))


@pytest.fixture(scope="module")
def windows(reference_model):
    from llama_cpp import Llama

    llama = Llama(str(reference_model), vocab_only=True, verbose=False)
    text = llama.tokenize("\n".join(packaged_documents()).encode(), False, False)
    llama.close()
    return np.array(text[: 12 * N], np.int32).reshape(-1, N)


def test_the_smallest_values_are_squared_together():
    values = torch.tensor([[9.0, 9.0, 9.0, 9.0], [4.0, -1.0, 2.0, -3.0], [1.0, 2.0, 3.0, 4.0]])
    gradients = torch.tensor([[9.0] * 4, [1.0, 1.0, 1.0, 1.0], [2.0, -1.0, 1.0, 0.0]])
    found = loss_growth._squares(values, gradients)
    by_count = {0: 0.0, 1: 1 + 4, 2: (-1 + 2) ** 2 + 0, 3: (-1 + 2 - 3) ** 2 + 9}
    for share, growth in zip(GRID, found, strict=True):
        if (n := round(share * 4)) in by_count:
            assert growth == pytest.approx(by_count[n]), share


def test_gradients_are_those_of_the_whole_model(teacher, windows, operands):
    """Check one value: the loss changes as its gradient says."""
    operand = next(one for one in operands if (one.layer, one.family) == (3, "ffn_down"))
    inputs, (output,) = loss_growth._forward(teacher, windows[:1])
    targets = loss_growth._drawn(teacher, output[0], torch.Generator().manual_seed(0))
    slopes = teacher.loss_gradient(output[0], targets)[None]
    for layer in reversed(range(3, teacher.blocks.n_layers)):
        here = [operand] if layer == 3 else []
        weights = teacher.weights(layer)
        slopes, terms = loss_growth._gradients(
            teacher, layer, weights, here, inputs[layer][0], slopes
        )
    ((values, gradients),) = terms
    assert values.shape == gradients.shape == (N, operand.n_channels)
    row, channel = divmod(int((values * gradients).abs().argmax()), operand.n_channels)
    before = float(teacher.losses(output[0], targets).sum())
    real, step = teacher.product, 0.01 * float(values[row, channel])

    def moved(layer, weights, name, x):
        if (layer, name) == (3, "ffn_down"):
            x = x.clone()
            x[0, row, channel] += step
        return real(layer, weights, name, x)

    teacher.product = moved
    try:
        after = float(teacher.losses(teacher.run(windows[:1])[0], targets).sum())
    finally:
        del teacher.product
    assert after - before == pytest.approx(step * float(gradients[row, channel]), rel=0.1)


def test_few_windows_are_kept_at_once(teacher, windows, operands, monkeypatch):
    some, done = list(windows[:3]), []
    expected = loss_growth.loss_growth(teacher, some, operands[:4])
    monkeypatch.setattr(loss_growth, "_KEPT_BYTES", 1)
    found = loss_growth.loss_growth(teacher, some, operands[:4], done.append)
    assert list(found) == list(expected)
    for one, values in expected.items():
        np.testing.assert_allclose(found[one], values, rtol=1e-6)
    assert done == sorted(done)
    assert done[-1] == 1


def test_measured_shares_lose_less_than_equal_ones(teacher, windows, operands, reference_model):
    tensors, done = tensors_of(reference_model), []
    growth = loss_growth.loss_growth(teacher, list(windows[:6]), operands, done.append)
    assert done == sorted(done)
    assert done[-1] == 1
    assert all(one[0] == 0 and (one[1:] > 0).all() for one in growth.values())
    n_weights = {
        one: sum(tensors[name].shape[0] * tensors[name].shape[1] for name in one.weights)
        for one in operands
    }
    measured = cheapest_shares(growth, n_weights)
    grids = sparse_student.grids_in(reference_model, operands, tensors)
    student, kl = sparse_student.SparseStudent(teacher, grids), []
    for shares in (measured, {one: equal_share() for one in operands}):
        teacher.share_by(shares)
        judged = distillation.judge(student, windows[6:], 16, (0.6, 0.7, 0.8))
        kl.append([np.mean([one.kl for one in found]) for found in judged.values()])
    teacher.share_by({})
    assert (np.array(kl[0]) < 0.8 * np.array(kl[1])).all(), kl
