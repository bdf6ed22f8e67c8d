"""Time and memory of distillation, estimated before it starts."""

from __future__ import annotations

from llmaas_plugins.elastic.units import Blocks
from llmaas_plugins.flash_weights.shares import SPARSITIES
from llmaas_plugins.training.costs import step_seconds
from llmaas_plugins.training.device import learning_device, used_bytes
from llmaas_plugins.training.distillation import SparseRecipe, Windows
from llmaas_plugins.training.objectives import MOST_LOGITS, Objective
from llmaas_plugins.training.sparse_student import SparseStudent

__all__ = ["distillation_bytes", "distillation_seconds"]

_LEARNED_BYTES = 16
"""Bytes of an own weight: its value, its gradient and the optimizer's two moments."""
_FACTOR_BYTES = 12 / 32
"""Bytes of a weight's share in its block's scale, min and largest magnitude."""
_ROUNDED_BYTES = 4


def distillation_bytes(  # noqa: PLR0913, PLR0917 -- everything that memory depends on
    weights_bytes: int, blocks: Blocks, n_own: int, n_vocab: int, recipe: SparseRecipe,
    n_window: int, *, is_kept: bool,
) -> int:  # fmt: skip
    """Return about how much of the device's memory distillation takes, with what the process has.

    Args:
        weights_bytes: Bytes of the model's weights as float32.
        blocks: Units of the model.
        n_own: Number of weights that learn.
        n_vocab: Size of the vocabulary.
        recipe: How to learn.
        n_window: Tokens of a window.
        is_kept: Whether all weights of the whole model stay in memory as float32.
    """
    n_layers = blocks.n_layers if is_kept else 1
    heads = blocks.n_groups * blocks.group_width
    # values that a layer keeps for the gradient: operands, masks, masked operands, products
    values = recipe.n_rows * n_window * (12 * blocks.n_embd + 7 * heads + 8 * blocks.n_ff)
    logits = 5 * min(MOST_LOGITS, recipe.n_rows * n_window * n_vocab)
    rounded = _ROUNDED_BYTES * n_own * n_layers // blocks.n_layers
    whole = weights_bytes if is_kept else weights_bytes // blocks.n_layers
    learned = int((_LEARNED_BYTES + _FACTOR_BYTES) * n_own)
    values_and_logits = 4 * (values * n_layers + logits)
    return used_bytes(learning_device()) + whole + learned + rounded + values_and_logits


def distillation_seconds(
    student: SparseStudent, windows: Windows, n_held_out: int, recipe: SparseRecipe
) -> float:
    """Return the seconds that distillation will take, from one step that changes nothing."""
    some = windows[: recipe.n_rows]
    student.teacher.mask = recipe.mask(recipe.sparsity_at(0))
    objective = Objective(student.teacher, recipe.loss, recipe.n_prompt)
    step_s = step_seconds(student, objective, some, recipe.n_prompt)
    # a window that is judged takes about half as long, as it needs no gradient
    n_others = 2 * len(recipe.judged) * n_held_out + len(SPARSITIES)
    return step_s * (recipe.n_steps(windows.shape[1]) + n_others / (2 * recipe.n_rows))
