"""The tiny model's second top: last layers that learn the chance of each setting (§3.3)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from llmaas_eval.prompts.encoded import N_BOTTOM, pooled
from llmaas_eval.prompts.heads import base_logits, knobs
from llmaas_plugins.short_prompts.encoder.body import Body
from llmaas_plugins.training.bert import PADDING, Bert

__all__ = ["TrainedTop"]

Values = NDArray[np.float64]

_N_EPOCHS, _N_ROWS = 2, 16
_RATE, _LINEAR_RATE = 5e-5, 1e-2
"""Highest learning rates of the layers, which are pretrained, and of the linear layer."""
_MOST_GRADIENT = 1.0


class TrainedTop:
    """Head on the shared bottom layers, whose own layers are trained."""

    def __init__(
        self,
        body: Body,
        ids: Sequence[Sequence[int]],
        is_right: NDArray[np.bool_],
        shape: Sequence[int],
    ) -> None:
        """Take the pieces of prompts, and their outcomes ``(n, n_settings)``."""
        self._body, self._ids = body, ids
        self._right = torch.tensor(is_right, dtype=torch.float32)
        self._knobs = torch.tensor(knobs(shape), dtype=torch.float32)

    def told(self, rows: NDArray[np.intp], others: NDArray[np.intp]) -> Values:
        """Learn from rows; return the probabilities of others, ``(n, n_settings)``."""
        bert = Bert(self._body, self._body.n_layers - N_BOTTOM, self._knobs.shape[1])
        weight = nn.Parameter(torch.zeros(2 * self._body.n_embd, self._knobs.shape[1]))
        base, right = base_logits(self._right[rows]), self._right

        def logits(some: NDArray[np.intp]) -> Tensor:
            windows = self._windows(some)
            states = pooled(bert.outputs(windows), windows != PADDING)
            found: Tensor = base + states @ weight @ self._knobs.T
            return found

        optimizer = torch.optim.AdamW([
            {"params": list(bert.trained.values()), "lr": _RATE},
            {"params": [weight], "lr": _LINEAR_RATE},
        ])  # fmt: skip
        n_steps = max(1, _N_EPOCHS * len(rows) // _N_ROWS)
        falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, n_steps)
        for some in self._batches(rows, n_steps):
            optimizer.zero_grad()
            loss = functional.binary_cross_entropy_with_logits(logits(some), right[some])
            loss.backward()
            nn.utils.clip_grad_norm_(bert.trained.values(), _MOST_GRADIENT)
            optimizer.step()
            falling.step()
        with torch.no_grad():
            parts = np.array_split(others, -(-len(others) // _N_ROWS))
            found = torch.cat([logits(part) for part in parts]).sigmoid()
        return np.asarray(found.numpy(), np.float64)

    def _windows(self, some: NDArray[np.intp]) -> Tensor:
        found = [self._ids[row] for row in some]
        windows = np.full((len(found), max(map(len, found))), PADDING, np.int64)
        for window, ids in zip(windows, found, strict=True):
            window[: len(ids)] = ids
        return torch.from_numpy(windows)

    @staticmethod
    def _batches(rows: NDArray[np.intp], n: int) -> list[NDArray[np.intp]]:
        chance = np.random.default_rng(0)
        turns = -(-n * _N_ROWS // len(rows))
        order = np.concatenate([chance.permutation(rows) for _ in range(turns)])
        return [order[i * _N_ROWS : (i + 1) * _N_ROWS] for i in range(n)]
