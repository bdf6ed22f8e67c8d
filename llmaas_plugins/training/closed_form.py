"""Adapters in closed form: the best low-rank estimate of what a level leaves out.

EoRA (Liu et al. 2024) approximates lost weights in the eigenspace of the activations. Here the lost
columns' inputs do not exist at the level. So the adapter regresses the missing part of a product on
the inputs that exist, and keeps the directions that explain most of it. Layers are fitted in order:
each sees its inputs as the level computes them, with the adapters of earlier layers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from llmaas_plugins.elastic.torch_model import Weights
from llmaas_plugins.training.student import Level

__all__ = ["N_WINDOWS", "fit"]

N_WINDOWS = 16
"""Most windows to fit on."""

_RIDGE = 0.3
"""Share of the inputs' mean variance that is added to each variance."""


def fit(
    level: Level, windows: NDArray[np.int32], progress: Callable[[int], None] = lambda _n: None
) -> None:
    """Set the adapters of the matrices that read units: ``attn_output`` and ``ffn_down``.

    The other matrices lose nothing where the level uses them. Their adapters start from 0.

    Args:
        level: The level, with adapters that change nothing.
        windows: Text, ``(n_windows, n_tokens)``; the first ``N_WINDOWS`` are used.
        progress: Called with 1 after each layer.
    """
    teacher = level.teacher
    with torch.no_grad():
        whole = part = teacher.embed(windows[:N_WINDOWS])
        for layer in range(teacher.blocks.n_layers):
            whole, part = _fit_layer(level, layer, whole, part)
            progress(1)


def _fit_layer(level: Level, layer: int, whole: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
    """Fit a layer's adapters; return the outputs of the whole model and of the level."""
    teacher = level.teacher
    everything, weights = teacher.weights(layer), level.weights(layer)
    whole, full = teacher.operands(layer, everything, whole)
    for name in ("attn_output", "ffn_down"):
        a, b = level.pair(layer, name)
        b.zero_()
        _, seen = teacher.operands(layer, weights, part)
        missing = _product(everything, name, full[name]) - _product(weights, name, seen[name])
        for parameter, fitted in zip((a, b), _regressed(seen[name], missing, a), strict=True):
            parameter.copy_(fitted)
    return whole, teacher.operands(layer, weights, part)[0]


def _regressed(inputs: Tensor, missing: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Return A and B for which ``B A x`` is nearest to what is missing, on average.

    They are fitted on one half of the windows. Each direction is then scaled, from 0 to 1, as suits
    the other half. A direction that only fits noise adds nothing: its row of A is the one of
    ``start``, and its column of B is 0.
    """
    middle = len(inputs) // 2
    x, y = inputs[:middle].flatten(0, 1), missing[:middle].flatten(0, 1)
    second, cross = (x.t() @ x).double(), (y.t() @ x).double()
    second.diagonal().add_(_RIDGE * second.diagonal().mean() + 1e-12)
    whole = torch.linalg.solve(second, cross.t()).t()
    _, directions = torch.linalg.eigh(whole @ cross.t())
    b = directions[:, -len(start) :]
    a = b.t() @ whole
    x, y = inputs[middle:].flatten(0, 1), missing[middle:].flatten(0, 1)
    found, real = x @ a.t().float(), y @ b.float()
    scales = ((found * real).sum(0) / found.square().sum(0).clamp_min(1e-12)).clamp(0, 1)
    sizes = (scales * a.norm(dim=1)).sqrt()  # equal norms of A and B suit the optimizer
    is_used = sizes > 0
    rows = a * (scales / sizes.clamp_min(1e-12))[:, None]
    return torch.where(is_used[:, None], rows.float(), start), (b * sizes).float()


def _product(weights: Weights, name: str, x: Tensor) -> Tensor:
    return functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))
