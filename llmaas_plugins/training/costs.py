"""Time and memory of learning, estimated before it starts."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from llmaas_plugins.elastic.torch_model import Decoder
from llmaas_plugins.model.gguf_header import read_header
from llmaas_plugins.training.closed_form import N_WINDOWS
from llmaas_plugins.training.device import used_bytes, wait
from llmaas_plugins.training.objectives import MOST_LOGITS, Objective
from llmaas_plugins.training.recovery import Recipe, Texts
from llmaas_plugins.training.student import Level

__all__ = ["level_seconds", "memory_bytes", "step_seconds", "weights_bytes"]

_WARM_TOKENS = 32


def level_seconds(level: Level, texts: Texts, recipe: Recipe) -> float:
    """Return the seconds that a level will take, from one step that changes nothing."""
    windows = texts.training[: recipe.n_rows]
    step_s = step_seconds(level, Objective(level.teacher, recipe.loss), windows)
    # a window without gradients takes about half as long; the closed form reads each three times
    n_others = 2 * len(texts.held_out) + 3 * N_WINDOWS * recipe.is_fitted
    return step_s * (recipe.n_steps(windows.shape[1]) + n_others / (2 * recipe.n_rows))


def step_seconds(
    module: nn.Module, objective: Objective, windows: NDArray[np.int32], n_prompt: int = 0
) -> float:
    """Return the seconds of a step that changes nothing.

    Another step comes first: the first one of a process takes longer, as it loads modules. It is
    short on a processor, where a step can take minutes. A GPU loads other kernels for other sizes.

    Args:
        module: Module that learns.
        objective: Loss of its outputs.
        windows: Windows of the step.
        n_prompt: First tokens of each window that the objective leaves out.
    """
    device = next(module.parameters()).device
    is_short = device.type == "cpu"
    _step(module, objective, windows[:1, : n_prompt + _WARM_TOKENS + 1] if is_short else windows)
    wait(device)
    started = time.monotonic()
    _step(module, objective, windows)
    wait(device)
    return time.monotonic() - started


def _step(module: nn.Module, objective: Objective, windows: NDArray[np.int32]) -> None:
    outputs = module(torch.from_numpy(windows[:, :-1].astype(np.int32)))
    _, gradient = objective(outputs, windows)
    outputs.backward(gradient)
    module.zero_grad(set_to_none=True)


def weights_bytes(path: Path) -> int:
    """Return the size of a model's weights as float32."""
    tensors = read_header(path).tensors.values()
    return 4 * sum(tensor.n_rows * tensor.n_columns for tensor in tensors)


def memory_bytes(path: Path, decoder: Decoder, recipe: Recipe, n_window: int) -> int:
    """Return about how much of the device's memory learning takes, with what the process has.

    Args:
        path: Path of the model.
        decoder: The model; its kept weights are part of the process already.
        recipe: How to learn.
        n_window: Tokens of a window.
    """
    blocks, n_tokens = decoder.blocks, max(recipe.n_rows, N_WINDOWS) * n_window
    heads = blocks.n_groups * blocks.group_width
    values = recipe.n_rows * n_window * (8 * blocks.n_embd + 5 * heads + 5 * blocks.n_ff)
    is_kept = getattr(decoder, "is_kept", True)
    values *= blocks.n_layers if is_kept else 1
    values += 2 * n_tokens * (blocks.n_embd + blocks.n_ff) + 4 * blocks.n_ff**2
    adapters = 4 * recipe.rank * blocks.n_layers * (4 * blocks.n_embd + 2 * heads + 3 * blocks.n_ff)
    logits = 4 * min(MOST_LOGITS, recipe.n_rows * n_window * decoder.n_vocab)
    layer = 0 if is_kept else weights_bytes(path) // blocks.n_layers
    return used_bytes(decoder.device) + 4 * (values + adapters + logits) + layer
