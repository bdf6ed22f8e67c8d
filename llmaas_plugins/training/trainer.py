"""The training loop: AdamW with warm-up and cosine decay, from a checkpoint or from the start.

Everything depends on the seed, the windows and the settings only. A run that was stopped and goes
on from its checkpoint ends with the same weights as one that was not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from llmaas_hooks import ConfigError
from llmaas_plugins.signals import signals_wait
from llmaas_plugins.training.batches import Batches
from llmaas_plugins.training.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from llmaas_plugins.training.workers import Workers

__all__ = ["Kept", "Settings", "train"]

_MOMENTS = ("exp_avg", "exp_avg_sq")
_WRITING_RATIO = 20
"""Least ratio of the time between two checkpoints to the time that writing one takes."""


class Objective(Protocol):
    """Function of a module's outputs and its windows: the mean loss, and its gradient."""

    def __call__(self, outputs: Tensor, windows: NDArray[np.int32]) -> tuple[float, Tensor]:
        """Return the loss, and its gradient with respect to ``outputs``."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a run.

    Attributes:
        n_steps: Number of steps.
        rate: Highest learning rate.
        warm_up: Share of the steps in which the rate rises.
        least: Share of ``rate`` at the end.
        most_norm: Norm to which gradients are clipped.
        factors: Factors of the rates of some parameters, by their names.
    """

    n_steps: int
    rate: float
    warm_up: float = 0.05
    least: float = 0.05
    most_norm: float = 1.0
    factors: Mapping[str, float] = field(default_factory=dict)

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step."""
        n_rising = max(1, round(self.warm_up * self.n_steps))
        if step < n_rising:
            return self.rate * (step + 1) / n_rising
        part = (step - n_rising) / max(1, self.n_steps - n_rising)
        return self.rate * (self.least + (1 - self.least) * (1 + math.cos(math.pi * part)) / 2)


@dataclass(frozen=True, slots=True)
class Kept:
    """Where a run is kept.

    Attributes:
        path: Path of the checkpoint.
        identity: SHA-256 of everything that the run depends on.
        every_s: Least seconds between checkpoints.
    """

    path: Path
    identity: str
    every_s: float = 30.0


def train(  # noqa: PLR0913 -- what learns, from what, and how
    module: nn.Module,
    objective: Objective,
    batches: Batches,
    settings: Settings,
    *,
    workers: Workers | None = None,
    kept: Kept | None = None,
    begin: Callable[[int], None] = lambda _step: None,
    progress: Callable[[int, float], None] = lambda _n, _loss: None,
) -> None:
    """Train the parameters of a module that require gradients.

    Args:
        module: Function from int32 windows, without their last tokens, to outputs.
        objective: Loss of the outputs.
        batches: Windows of each step.
        settings: Settings of the run.
        workers: Processes that train together; each calls this function.
        kept: Where to keep the run. It goes on from a checkpoint that exists there.
        begin: Called before each step with its number.
        progress: Called after each step with its tokens and its loss; once with those of a
            checkpoint and NaN.

    Raises:
        ConfigError: The checkpoint is damaged, or of another run; or learning diverged.
        StoreError: The checkpoint cannot be read or written.
    """
    run = _Run(module, settings, workers or Workers(), kept)
    progress(run.step * batches.n_tokens, math.nan)
    try:
        while run.step < settings.n_steps:
            begin(run.step)
            loss = run.advance(objective, batches.at(run.step))
            progress(batches.n_tokens, loss)
    finally:
        run.keep()


class _Run:
    """State of a run.

    Attributes:
        step: Number of steps done.
    """

    def __init__(
        self, module: nn.Module, settings: Settings, workers: Workers, kept: Kept | None
    ) -> None:
        self.step, self._settings, self._workers, self._kept = 0, settings, workers, kept
        self._parameters = {
            name: each for name, each in module.named_parameters() if each.requires_grad
        }
        self._optimizer = torch.optim.AdamW(
            self._groups(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self._resume()
        self._module = workers.together(module)
        self._kept_step, self._kept_at = self.step, time.monotonic()
        self._wait_s = kept.every_s if kept else math.inf

    def advance(self, objective: Objective, windows: NDArray[np.int32]) -> float:
        """Do one step, and return its loss.

        Raises:
            ConfigError: Learning diverged. The parameters stay as they were before the step.
        """
        outputs = self._module(torch.from_numpy(windows[:, :-1].astype(np.int32)))
        loss, gradient = objective(outputs, windows)
        outputs.backward(gradient)
        self._clip()
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.rate_at(self.step) * group["factor"]
        with signals_wait():
            self._optimizer.step()
            self.step += 1
        self._optimizer.zero_grad(set_to_none=True)
        if self._kept is not None and time.monotonic() - self._kept_at > self._wait_s:
            self.keep()
        return loss

    def keep(self) -> None:
        """Write a checkpoint if there are new steps."""
        if self._kept is None or not self._workers.is_first or self.step == self._kept_step:
            return
        started = time.monotonic()
        with signals_wait():
            checkpoint = Checkpoint(self.step, self._arrays())
            write_checkpoint(self._kept.path, self._kept.identity, checkpoint)
        self._kept_step, self._kept_at = self.step, time.monotonic()
        self._wait_s = max(self._kept.every_s, _WRITING_RATIO * (self._kept_at - started))

    def _groups(self) -> list[dict[str, Any]]:
        """Return the parameters by the factors of their rates."""
        groups = dict[float, list[Tensor]]()
        for name, each in self._parameters.items():
            groups.setdefault(self._settings.factors.get(name, 1.0), []).append(each)
        return [{"params": some, "factor": factor} for factor, some in groups.items()]

    def _clip(self) -> None:
        norm = nn.utils.clip_grad_norm_(self._parameters.values(), self._settings.most_norm)
        if not math.isfinite(norm):
            raise ConfigError(
                f"learning diverged at step {self.step + 1}: the gradient's norm is {float(norm)}, "
                "expected a finite number. Check the model, or learn from another text with "
                "`--text FILE` or another number of tokens with `--tokens N`."
            )

    def _arrays(self) -> dict[str, NDArray[np.float32]]:
        found = {name: each.detach().cpu().numpy() for name, each in self._parameters.items()}
        for name, each in self._parameters.items():
            state = self._optimizer.state[each]
            found |= {f"{name}|{moment}": state[moment].cpu().numpy() for moment in _MOMENTS}
        return found

    def _resume(self) -> None:
        """Go on from the checkpoint that the first worker finds."""
        found = self._read() if self._workers.is_first else None
        step = torch.tensor(found.step if found else 0)
        self._workers.share(step)
        self.step = int(step)
        if self.step:
            self._set({} if found is None else found.arrays)

    def _read(self) -> Checkpoint | None:
        if self._kept is None:
            return None
        shapes = {name: tuple(each.shape) for name, each in self._parameters.items()}
        for name, shape in list(shapes.items()):
            shapes |= {f"{name}|{moment}": shape for moment in _MOMENTS}
        return read_checkpoint(self._kept.path, self._kept.identity, shapes)

    def _set(self, arrays: Mapping[str, NDArray[np.float32]]) -> None:
        """Set parameters and moments to the first worker's arrays."""
        with torch.no_grad():
            for name, each in self._parameters.items():
                state = {moment: torch.zeros_like(each) for moment in _MOMENTS}
                for key, tensor in {name: each, **{f"{name}|{m}": state[m] for m in state}}.items():
                    if arrays:
                        tensor.copy_(torch.from_numpy(arrays[key]))
                    self._workers.share(tensor)
                step = torch.tensor(float(self.step), device=each.device)
                self._optimizer.state[each] = {"step": step, **state}
