"""Distillation: masks and gradients by hand, dense prompts, resumption, and what it wins back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from flash_models import tensors_of
from masked_llama import MaskedLlama

from llmaas_eval.data import packaged_documents
from llmaas_hooks import ConfigError
from llmaas_plugins.flash_weights.channel_layout import channel_operands
from llmaas_plugins.flash_weights.grids import Grid
from llmaas_plugins.flash_weights.shares import SPARSITIES, equal_share

torch = pytest.importorskip("torch", reason="make test-train installs it")
costs = pytest.importorskip("llmaas_plugins.training.distillation_costs")
distillation = pytest.importorskip("llmaas_plugins.training.distillation")
objectives = pytest.importorskip("llmaas_plugins.training.objectives")
recovery = pytest.importorskip("llmaas_plugins.training.recovery")
sparse_student = pytest.importorskip("llmaas_plugins.training.sparse_student")
trainer = pytest.importorskip("llmaas_plugins.training.trainer")

N, N_PROMPT = 64, 16
RECIPE = distillation.SparseRecipe(4 * N, n_prompt=N_PROMPT, n_rows=1, rate=1e-3)
IDENTITY = "0" * 64


@pytest.fixture(scope="module")
def operands(reference_model):
    return channel_operands(tensors_of(reference_model))


@pytest.fixture(scope="module")
def grids(reference_model, operands):
    return sparse_student.grids_in(reference_model, operands, tensors_of(reference_model))


@pytest.fixture(scope="module")
def teacher(reference_model):
    return sparse_student.MaskedTeacher(reference_model)


@pytest.fixture
def student(teacher, grids):
    return sparse_student.SparseStudent(teacher, grids)


@pytest.fixture(scope="module")
def windows(reference_model):
    from llama_cpp import Llama

    llama = Llama(str(reference_model), vocab_only=True, verbose=False)
    text = llama.tokenize("\n".join(packaged_documents()).encode(), False, False)
    llama.close()
    return np.array(text[: len(text) // N * N], np.int32).reshape(-1, N)


def changed(student, seed=0):
    """Change the student's matrices by a few per cent."""
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for each in student.parameters():
            each.mul_(1 + 0.05 * torch.randn(each.shape, generator=chance))
    return student


# -- masks and rounding --------------------------------------------------------------------------


def top_k(x, sparsity):
    """Set all but the largest magnitudes of each row to 0, in plain numpy."""
    kept = np.zeros_like(x)
    for row, out in zip(x, kept, strict=True):
        chosen = sorted(range(len(row)), key=lambda i: -abs(row[i]))
        for i in chosen[: round(len(row) * (1 - sparsity))]:
            out[i] = row[i]
    return kept


@pytest.mark.parametrize("sparsity", [0.0, 0.4, 0.75, 1.0])
def test_each_token_keeps_its_largest_values(sparsity):
    x = np.random.default_rng(0).standard_normal((2, 5, 24), np.float32)
    found = sparse_student.largest(torch.from_numpy(x), sparsity)
    for some, expected in zip(found.numpy(), x, strict=True):
        assert np.array_equal(some, top_k(expected, sparsity))


@pytest.mark.parametrize("is_straight", [True, False])
def test_gradients_of_a_masked_product_by_hand(teacher, is_straight):
    rng = np.random.default_rng(1)
    x, w, whole, c = (
        rng.standard_normal(shape, np.float32) for shape in ((6, 8), (4, 8), (4, 8), (6, 4))
    )
    tensors = {"x": torch.from_numpy(x), "w": torch.from_numpy(w)}
    for each in tensors.values():
        each.requires_grad_()
    teacher.mask = sparse_student.Mask(0.5, 2, is_straight)
    weights = {"ffn_down.weight": torch.from_numpy(whole), "ffn_down.sparse": tensors["w"]}
    y = teacher.product(0, weights, "ffn_down", tensors["x"])
    teacher.forget()
    y.backward(torch.from_numpy(c))
    read = top_k(x[2:], 0.5)
    np.testing.assert_allclose(y.detach()[:2], x[:2] @ whole.T, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(y.detach()[2:], read @ w.T, rtol=1e-5, atol=1e-6)
    # Eq 12: all values get a gradient; matrices get that of the values that they read
    expected = c[2:] @ w * (1 if is_straight else read != 0)
    np.testing.assert_allclose(tensors["x"].grad[2:], expected, rtol=1e-5, atol=1e-6)
    assert not tensors["x"].grad[:2].any()
    np.testing.assert_allclose(tensors["w"].grad, c[2:].T @ read, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [0.0, 0.01])
def test_a_block_of_zeros_keeps_its_scale(scale):
    grid = Grid(np.zeros((1, 32), np.int8), np.full((1, 1), scale, np.float16), None, -8, 7)
    first = torch.from_numpy(grid.values)
    found = sparse_student.rounded(first + 0.012, first, grid)
    assert found.unique().tolist() == [np.float32(np.float16(scale))]


@pytest.mark.parametrize("has_mins", [False, True])
def test_rounding_by_hand(has_mins):
    rng = np.random.default_rng(2)
    least, most = (0, 15) if has_mins else (-8, 7)
    numbers = rng.integers(least, most, (3, 64), np.int8, endpoint=True)
    scales = rng.uniform(0.5, 1, (3, 2)).astype(np.float16)
    mins = rng.uniform(3, 6, (3, 2)).astype(np.float16) if has_mins else None
    grid = Grid(numbers, scales, mins, least, most)
    first = torch.from_numpy(grid.values)
    assert torch.equal(sparse_student.rounded(first, first, grid), first)
    values = (1.25 * first + 0.1).requires_grad_()
    found = sparse_student.rounded(values, first, grid)
    for block in range(6):
        row, at = divmod(block, 2)
        columns = slice(32 * at, 32 * at + 32)
        old, new = grid.values[row, columns], values.detach().numpy()[row, columns]
        growth = np.abs(new).max() / np.abs(old).max()
        step = np.float32(np.float16(np.float32(scales[row, at]) * growth))
        low = 0 if mins is None else np.float32(np.float16(np.float32(mins[row, at]) * growth))
        expected = np.clip(np.round((new + low) / step), least, most) * step - low
        np.testing.assert_allclose(found.detach()[row, columns], expected, rtol=1e-5, atol=1e-6)
    found.backward(gradient := torch.randn(3, 64))
    assert torch.equal(values.grad, gradient)


# -- the student ---------------------------------------------------------------------------------


def test_a_student_that_learned_nothing_computes_what_numpy_computes(
    reference_model, student, windows
):
    student.teacher.mask = sparse_student.Mask(0.6, N_PROMPT)
    outputs = student(torch.from_numpy(windows[:1]))
    found = student.teacher.logits(outputs[0]).detach().numpy()

    def masked(_layer, _family, x):
        return np.concatenate([x[:N_PROMPT], top_k(x[N_PROMPT:], 0.6)])

    expected = MaskedLlama(reference_model).logits(windows[0], masked)[N_PROMPT:]
    # a value at the edge of the mask may fall on the other side in 32 bits
    assert np.abs(found - expected).mean() < 1e-3 * np.abs(expected).mean()


def test_prompts_are_the_teachers_whatever_the_student_learned(student, windows):
    changed(student)
    teacher, tokens = student.teacher, torch.from_numpy(windows[:2])
    teacher.mask = sparse_student.Mask(0.6, N_PROMPT)
    x = whole = teacher.embed(windows[:2])
    for layer in range(teacher.blocks.n_layers):
        x = student.apply_layer(layer, x)
        whole = teacher.apply(layer, whole)
        torch.testing.assert_close(x[:, :N_PROMPT], whole[:, :N_PROMPT])
        assert not torch.allclose(x[:, N_PROMPT:], whole[:, N_PROMPT:], atol=1e-3)
    torch.testing.assert_close(student(tokens), x[:, N_PROMPT:])


def test_without_prompt_and_mask_only_the_own_matrices_count(reference_model, student, windows):
    changed(student)
    student.teacher.mask = sparse_student.Mask(0.0, 0)
    found = student(torch.from_numpy(windows[:1]))
    other = sparse_student.MaskedTeacher(reference_model)
    for name in student.names:
        _, layer, matrix, _ = name.split(".")
        values = torch.from_numpy(student.grid(name).values)
        other._layers[int(layer)][f"{matrix}.weight"] = values
    torch.testing.assert_close(found, other.run(windows[:1]), rtol=1e-4, atol=1e-4)


def test_layers_read_one_by_one_have_the_same_gradients(reference_model, grids, windows):
    found = []
    for is_kept in (True, False):
        teacher = sparse_student.MaskedTeacher(reference_model, is_kept=is_kept)
        student = sparse_student.SparseStudent(teacher, grids)
        distillation.distill(student, windows[:1], replace(RECIPE, n_tokens=N))
        found.append({name: each.detach() for name, each in student.named_parameters()})
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, rtol=1e-4, atol=1e-6)


# -- training ------------------------------------------------------------------------------------


def test_sparsities_are_drawn_anew_for_each_step():
    found = [RECIPE.sparsity_at(step) for step in range(400)]
    assert 0.4 <= min(found) < 0.42
    assert 0.78 < max(found) <= 0.8
    assert np.mean(found) == pytest.approx(0.6, abs=0.02)
    assert found == [RECIPE.sparsity_at(step) for step in range(400)]
    assert found != [replace(RECIPE, seed=1).sparsity_at(step) for step in range(400)]
    assert replace(RECIPE, sparsity=0.7).sparsity_at(3) == 0.7


class StoppedError(Exception):
    """The run was stopped."""


def test_a_run_that_was_stopped_ends_as_one_that_was_not(teacher, grids, windows, tmp_path):
    def run(kept, most=10):
        done = []

        def progress(n):
            done.append(n)
            if len(done) > most:  # the first call reports the checkpoint
                raise StoppedError

        student = sparse_student.SparseStudent(teacher, grids)
        try:
            distillation.distill(student, windows[:3], RECIPE, kept=kept, progress=progress)
        except StoppedError:
            return None
        return done, {name: each.detach() for name, each in student.named_parameters()}

    kept = trainer.Kept(tmp_path / "run.npz", IDENTITY)
    _, expected = run(None)
    assert run(kept, most=2) is None
    done, found = run(kept)
    assert done == [2 * N, N, N]
    for name, values in expected.items():
        assert torch.equal(found[name], values), name
    with pytest.raises(ConfigError, match="it is of a run with other settings"):
        run(replace(kept, identity="1" * 64))


def equal_shares(operands):
    return {operand: equal_share() for operand in operands}


def test_a_run_depends_on_everything_that_it_is_made_of(windows, operands):
    of, shares = distillation.run_identity, equal_shares(operands)
    others = {**shares, operands[0]: shares[operands[0]] / 2}
    found = {
        of("a", windows, shares, RECIPE),
        of("b", windows, shares, RECIPE),
        of("a", windows[1:], shares, RECIPE),
        of("a", windows.reshape(-1, N // 2), shares, RECIPE),
        of("a", windows, others, RECIPE),
        *(
            of("a", windows, shares, replace(RECIPE, **one))
            for one in ({"sparsity": 0.5}, {"n_prompt": 0}, {"is_straight": True}, {"seed": 1})
        ),
    }
    assert len(found) == 9


def test_it_is_judged_at_the_sparsity_that_it_learned():
    assert RECIPE.judged == (0.5, 0.6, 0.7, 0.8)
    assert replace(RECIPE, sparsity=0.9).judged == (0.5, 0.6, 0.7, 0.8, 0.9)
    assert replace(RECIPE, sparsity=0.6).judged == RECIPE.judged


def test_closure_is_the_share_of_the_gap_that_is_won_back():
    before, after, dense = (recovery.Quality(0.0, loss, 2.0) for loss in (3.0, 2.25, 2.0))
    assert objectives.closure(before, after) == pytest.approx(0.75)
    assert objectives.closure(dense, after) is None


@pytest.mark.slow
def test_distillation_wins_back_part_of_what_sparsity_costs(student, operands, windows):
    texts = recovery.Texts(windows[:-8], windows[-8:])
    judged = RECIPE.judged
    before = distillation.judge(student, texts.held_out, N_PROMPT, judged)
    assert not distillation.is_better(before, before)
    recipe = replace(RECIPE, n_tokens=24 * 4 * N, n_rows=4, rate=3e-4)
    distillation.distill(student, texts.training, recipe)
    after = distillation.judge(student, texts.held_out, N_PROMPT, judged)
    assert distillation.is_better(before, after)
    assert not distillation.is_better(after, before)
    for sparsity in (0.6, 0.7, 0.8):
        kl = [np.mean([one.kl for one in found[sparsity]]) for found in (before, after)]
        assert kl[1] < kl[0]
        means = [objectives.mean_quality(found[sparsity]) for found in (before, after)]
        assert objectives.closure(*means) > 0
    # what is judged are the numbers that the file will have
    student.load({name: student.grid(name).values for name in student.names})
    student.is_rounded = False
    assert distillation.judge(student, texts.held_out[:2], N_PROMPT, (0.6,))[0.6] == after[0.6][:2]
    check_thresholds(student, windows, operands)


def check_thresholds(student, windows, operands):
    """Check that thresholds leave out the share of values that they are to."""
    found = distillation.calibrate(student, windows, equal_shares(operands), N_PROMPT)
    assert list(found) == operands
    sparsity, shares = SPARSITIES[11], []
    student.teacher.mask = sparse_student.Mask(sparsity, N_PROMPT)
    for window in windows[20:24, None]:
        for operand, sizes in distillation._sizes(student, window, operands, N_PROMPT):
            shares.append((sizes < found[operand].thresholds[11]).mean())
            assert found[operand].means.shape == (operand.n_channels,)
    assert np.mean(shares) == pytest.approx(sparsity, abs=0.03)


def test_costs_are_estimated(teacher, student, windows, reference_model):
    n_own = sum(each.numel() for each in student.parameters())
    found = [
        costs.distillation_bytes(
            30 << 20, teacher.blocks, n_own, teacher.n_vocab, RECIPE, N, is_kept=is_kept
        )
        for is_kept in (True, False)
    ]
    assert 16 * n_own < found[1] < found[0] < 4 << 30
    assert costs.distillation_seconds(student, windows, 2, RECIPE) > 0
    assert all(each.grad is None for each in student.parameters())
