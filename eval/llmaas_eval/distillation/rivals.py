"""Other ways to choose the values that a sparse token leaves out: TEAL's and WINA's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmaas_hooks import TensorInfo
from llmaas_plugins.flash_weights.operands import FAMILIES, Operand
from llmaas_plugins.flash_weights.shares import GRID, SPARSITIES, Shares, weight_counts
from llmaas_plugins.training.sparse_student import Mask, MaskedTeacher, SparseStudent, largest

__all__ = ["Weighted", "block_shares"]

_STEP = 0.05
"""Share of a block's weights that a step leaves out."""


class Weighted(MaskedTeacher):
    """Teacher that leaves out values by their magnitude times the norm of their column (WINA).

    The norm is that of the columns of all matrices that read the value.
    """

    def __init__(self, path: Path) -> None:
        """Read the model, and compute the norms."""
        super().__init__(path)
        self._norms: dict[tuple[int, str], Tensor] = {}
        for layer in range(self.blocks.n_layers):
            weights = self.weights(layer)
            for names in FAMILIES.values():
                matrices = torch.cat([weights[f"{name}.weight"] for name in names])
                for name in names:
                    self._norms[layer, name] = matrices.norm(dim=0)

    def _masked(self, layer: int, name: str, x: Tensor) -> Tensor:
        answer = x[..., self.mask.n_prompt :, :]
        share = self._left_out(layer, name)
        kept = largest(answer * self._norms[layer, name], share, is_straight=False) != 0
        return answer * kept


def block_shares(
    student: SparseStudent,
    windows: Sequence[NDArray[np.int32]],
    operands: Sequence[Operand],
    tensors: Mapping[str, TensorInfo],
) -> Shares:
    """Return the shares that TEAL's greedy algorithm chooses (Liu et al. 2024, Algorithm 1).

    All blocks reach the same sparsity. In each, the operand whose step adds the least to the error
    of the block's output takes the next step.
    """
    teacher = student.teacher
    inputs = [teacher.embed(np.stack(windows))]
    for layer in range(teacher.blocks.n_layers):
        inputs.append(teacher.apply(layer, inputs[-1]))
    found = dict[Operand, NDArray[np.float32]]()
    for layer in range(teacher.blocks.n_layers):
        block = _Block(student, layer, inputs[layer], inputs[layer + 1])
        weights = weight_counts((one for one in operands if one.layer == layer), tensors)
        path = _greedy(block, weights)
        left_out = [_sparsity(shares, weights) for shares in path]
        for one in weights:
            known = np.interp(SPARSITIES, left_out, [shares[one] for shares in path])
            found[one] = known.astype(np.float32)
    teacher.share_by({})
    return found


# -- inside --------------------------------------------------------------------------------------

_ByOperand = Mapping[Operand, float]


class _Block:
    """One layer of the student, with its inputs and the outputs of the whole model."""

    def __init__(self, student: SparseStudent, layer: int, x: Tensor, y: Tensor) -> None:
        self._student, self._layer, self._x, self._y = student, layer, x, y

    def error(self, shares: _ByOperand) -> float:
        """Return the squared error of the outputs if these shares are left out."""
        teacher = self._student.teacher
        teacher.share_by(
            {one: np.full(len(SPARSITIES), share, np.float32) for one, share in shares.items()}
        )
        teacher.mask = Mask(SPARSITIES[-1], 1)
        with torch.no_grad():
            y = teacher.block(self._layer, self._student.weights(self._layer), self._x)
        teacher.forget()
        return float((y - self._y).square().sum())


def _greedy(block: _Block, weights: Mapping[Operand, int]) -> list[_ByOperand]:
    """Return the shares after each step, from none left out to nearly all."""
    total = sum(weights.values())
    path: list[_ByOperand] = [dict.fromkeys(weights, 0.0)]
    while True:
        now = path[-1]
        grown = {one: now[one] + _STEP * total / (len(weights) * weights[one]) for one in weights}
        trials = [
            {**now, one: min(share, float(GRID[-1]))}
            for one, share in grown.items()
            if now[one] < GRID[-1]
        ]
        if not trials:
            return path
        path.append(min(trials, key=block.error))


def _sparsity(shares: _ByOperand, weights: Mapping[Operand, int]) -> float:
    return sum(shares[one] * weights[one] for one in weights) / sum(weights.values())
