"""A model whose answers use only the largest values of each activation, as the sparse mode does.

The student has matrices of its own for answers. Prompts are computed by the whole model, with all
values. Rounding to the channel file's numbers is straight through for gradients, and masks can be
(ActiveFlow §5, Eqs 11 and 12).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from llmaas_hooks import TensorInfo
from llmaas_plugins.elastic.torch_model import Weights
from llmaas_plugins.flash_weights.columns import BLOCK_COLUMNS
from llmaas_plugins.flash_weights.grids import Grid, grid_of
from llmaas_plugins.flash_weights.model_weights import ModelWeights
from llmaas_plugins.flash_weights.operands import FAMILIES, Operand
from llmaas_plugins.flash_weights.shares import Shares, at_sparsity
from llmaas_plugins.training.student import Teacher

__all__ = ["Mask", "MaskedTeacher", "SparseStudent", "grids_in", "largest", "rounded"]

_FAMILY = {matrix: family for family, matrices in FAMILIES.items() for matrix in matrices}
_OWN = "sparse"
"""Suffix of an own matrix of the student, among a layer's weights."""


class Mask(NamedTuple):
    """Values that products leave out.

    Attributes:
        sparsity: Share of all channels' weights that is left out.
        n_prompt: First tokens of each window, which the whole model computes with all values.
        is_straight: Whether gradients pass the mask as if nothing was left out.
    """

    sparsity: float
    n_prompt: int
    is_straight: bool = True


class MaskedTeacher(Teacher):
    """The whole model. A product with an own matrix of the student is masked, except for prompts.

    Attributes:
        mask: Values that the student leaves out.
    """

    mask = Mask(0.0, 0)
    _last: tuple[Tensor, Tensor] | None = None
    _shares: Mapping[tuple[int, str], NDArray[np.float32]] = MappingProxyType({})

    def share_by(self, shares: Shares) -> None:
        """Leave out these shares of each activation's values; without, all have the same."""
        self._shares = {
            (one.layer, name): share
            for one, share in shares.items()
            for name in FAMILIES[one.family]
        }

    def product(self, layer: int, weights: Weights, name: str, x: Tensor) -> Tensor:
        """Return ``x`` multiplied by a matrix; masked where the student has a matrix of its own."""
        own = weights.get(f"{name}.{_OWN}")
        if own is None:
            return super().product(layer, weights, name, x)
        if self._seen is not None:
            self._seen[name] = x
        n = self.mask.n_prompt
        y = functional.linear(self._masked(layer, name, x), own, weights.get(f"{name}.bias"))
        if n == 0:
            return y
        with torch.no_grad():  # prompts depend on nothing that learns
            prompt = functional.linear(
                x[..., :n, :], weights[f"{name}.weight"], weights.get(f"{name}.bias")
            )
        return torch.cat((prompt, y), -2)

    def _masked(self, layer: int, name: str, x: Tensor) -> Tensor:
        """Return the answer's part of ``x``, masked. Matrices of a family read the same ``x``."""
        if self._last is None or self._last[0] is not x:
            answer, left_out = x[..., self.mask.n_prompt :, :], self._left_out(layer, name)
            self._last = x, largest(answer, left_out, is_straight=self.mask.is_straight)
        return self._last[1]

    def _left_out(self, layer: int, name: str) -> float:
        """Return the share of the values that a matrix leaves out."""
        share, sparsity = self._shares.get((layer, name)), self.mask.sparsity
        return sparsity if share is None else at_sparsity(share, sparsity)

    def forget(self) -> None:
        """Release the activations of the last product."""
        self._last = None


class SparseStudent(nn.Module):
    """Student with own matrices for answers. They start as the channel file's.

    The parameters are named ``layer:matrix``.

    Attributes:
        teacher: The whole model.
        is_rounded: Whether products use the values that the channel file can store.
        names: Names of the own matrices' weights.
    """

    def __init__(self, teacher: MaskedTeacher, grids: Mapping[str, Grid]) -> None:
        """Copy the matrices of the channel file.

        Args:
            teacher: The whole model.
            grids: Matrices as the channel file stores them, by weight name.
        """
        super().__init__()
        self.teacher, self.is_rounded, self.names = teacher, True, tuple(grids)
        self.matrices = nn.ParameterDict()
        self._grids: dict[str, _Blocks] = {}
        for weight, grid in grids.items():
            _, layer, name, _ = weight.split(".")
            values = torch.from_numpy(grid.values).to(teacher.device)
            self.matrices[f"{layer}:{name}"] = nn.Parameter(values)
            self._grids[f"{layer}:{name}"] = _Blocks(values, grid)

    def forward(self, windows: Tensor) -> Tensor:
        """Return the last layer's outputs for the answers of int32 windows.

        The shape is ``(n_windows, n_tokens - n_prompt, n_embd)``.
        """
        x = self.teacher.embed(windows.numpy())
        for layer in range(self.teacher.blocks.n_layers):
            x = self.apply_layer(layer, x)
        self.teacher.forget()
        return x[:, self.teacher.mask.n_prompt :]

    def apply_layer(self, layer: int, x: Tensor) -> Tensor:
        """Return a layer's outputs. Weights that are not kept are read again for the gradient."""

        def block(x: Tensor) -> Tensor:
            return self.teacher.block(layer, self.weights(layer), x)

        if self.teacher.is_kept or not torch.is_grad_enabled():
            return block(x)
        return checkpoint(block, x, use_reentrant=False)

    def weights(self, layer: int) -> Weights:
        """Return the weights of a layer, with the student's own matrices."""
        found = dict(self.teacher.weights(layer))
        for name in _FAMILY:
            own = self.matrices[key] if (key := f"{layer}:{name}") in self.matrices else None
            if own is not None:
                found[f"{name}.{_OWN}"] = (
                    _Rounded.apply(own, self._grids[key]) if self.is_rounded else own
                )
        return found

    def grid(self, weight: str) -> Grid:
        """Return a matrix as the channel file can store it."""
        _, layer, name, _ = weight.split(".")
        key = f"{layer}:{name}"
        return self._grids[key].grid(self.matrices[key].detach())

    def load(self, values: Mapping[str, NDArray[np.float32]]) -> None:
        """Set matrices by weight name."""
        with torch.no_grad():
            for weight, each in values.items():
                _, layer, name, _ = weight.split(".")
                self.matrices[f"{layer}:{name}"].copy_(torch.from_numpy(each))


def grids_in(
    model: Path, operands: Sequence[Operand], tensors: Mapping[str, TensorInfo]
) -> dict[str, Grid]:
    """Return a model's matrices as its channel file stores them, by weight name.

    Raises:
        ConfigError: The file is no GGUF file, or is damaged.
        StoreError: The file cannot be read, or was changed meanwhile.
    """
    names = [name for operand in operands for name in operand.weights]
    with ModelWeights(model) as weights:
        return {
            name: grid_of(tensors[name], weights.read(name)) for name in weights.unchanged(names)
        }


def largest(x: Tensor, sparsity: float, *, is_straight: bool = True) -> Tensor:
    """Keep the largest values of each token, and set the share ``sparsity`` of them to 0.

    Args:
        x: Activations, ``(…, n_tokens, n_channels)``.
        sparsity: Share of the channels that is left out.
        is_straight: Whether the gradient is that of the identity.
    """
    n_kept = round(x.shape[-1] * (1 - sparsity))
    if n_kept == x.shape[-1]:
        return x
    with torch.no_grad():
        sizes = x.abs()
        if n_kept == 0:
            kept = torch.zeros_like(x)
        else:  # faster than topk; values of equal size at the edge are all kept
            least = sizes.kthvalue(x.shape[-1] - n_kept + 1, -1, keepdim=True).values
            kept = (sizes >= least).to(x.dtype)
    found: Tensor = _Straight.apply(x, kept) if is_straight else x * kept
    return found


def rounded(values: Tensor, first: Tensor, grid: Grid) -> Tensor:
    """Return the nearest values that a matrix can have in the channel file.

    The factors of each block grow with its largest magnitude. The gradient is that of the identity.

    Args:
        values: Values of the matrix, ``(n_rows, n_columns)``.
        first: Values of ``grid``.
        grid: Matrix as the channel file stores it at first.
    """
    found: Tensor = _Rounded.apply(values, _Blocks(first, grid))
    return found


# -- inside --------------------------------------------------------------------------------------


class _Blocks:
    """Factors of a matrix's blocks, as a function of the matrix's values."""

    def __init__(self, values: Tensor, grid: Grid) -> None:
        self._scales = torch.from_numpy(grid.scales.astype(np.float32)).to(values.device)
        self._mins = None
        if grid.mins is not None:
            self._mins = torch.from_numpy(grid.mins.astype(np.float32)).to(values.device)
        self._least, self._most = grid.least, grid.most
        self._peaks = _peaks(values)

    def numbers(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return whole numbers, ``(n_rows, n_blocks, 32)``, with scales and mins of the blocks."""
        growth = torch.where(self._peaks > 0, _peaks(values) / self._peaks, 1.0)  # zeros had none
        scales = (self._scales * growth).half().float()
        mins = None if self._mins is None else (self._mins * growth).half().float()
        blocks = _blocked(values)
        if mins is not None:
            blocks = blocks + mins[..., None]
        steps = torch.where(scales == 0, torch.ones_like(scales), scales)[..., None]
        return (blocks / steps).round_().clamp_(self._least, self._most), scales, mins

    def rounded(self, values: Tensor) -> Tensor:
        numbers, scales, mins = self.numbers(values)
        found = numbers * scales[..., None]
        if mins is not None:
            found -= mins[..., None]
        return found.view_as(values)

    def grid(self, values: Tensor) -> Grid:
        numbers, scales, mins = self.numbers(values)
        halves = None if mins is None else mins.half().cpu().numpy()
        return Grid(
            numbers.view_as(values).to(torch.int8).cpu().numpy(), scales.half().cpu().numpy(),
            halves, self._least, self._most,
        )  # fmt: skip


def _blocked(values: Tensor) -> Tensor:
    return values.unflatten(-1, (-1, BLOCK_COLUMNS))


def _peaks(values: Tensor) -> Tensor:
    return _blocked(values).abs().amax(-1)


class _Straight(torch.autograd.Function):
    """Mask whose gradient is that of the identity (Eq 12)."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor, kept: Tensor) -> Tensor:
        return x * kept

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Rounded(torch.autograd.Function):
    """Rounding whose gradient is that of the identity."""

    @staticmethod
    def forward(_ctx: Any, values: Tensor, blocks: _Blocks) -> Tensor:
        return blocks.rounded(values)

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
