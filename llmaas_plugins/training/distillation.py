"""Self-distillation for sparse tokens (ActiveFlow §5): training, calibration, and a judgment.

The teacher is the whole model with all values. The student computes the rest of each window with
the largest values only, as deployed: the prompt's cells are the teacher's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmaas_hooks import StoreError, TensorInfo
from llmaas_plugins.flash_weights.calibration import Activity, Calibration
from llmaas_plugins.flash_weights.channel_header import Distilled
from llmaas_plugins.flash_weights.channels import ChannelFile, Distillation
from llmaas_plugins.flash_weights.container_file import Bytes
from llmaas_plugins.flash_weights.grids import matrices_in, stored
from llmaas_plugins.flash_weights.operands import Operand
from llmaas_plugins.flash_weights.shares import SPARSITIES, Shares
from llmaas_plugins.training.batches import Batches, Lengths
from llmaas_plugins.training.objectives import Objective, Quality, batched, improves, qualities
from llmaas_plugins.training.sparse_student import Mask, SparseStudent
from llmaas_plugins.training.trainer import Kept, Settings, train
from llmaas_plugins.training.workers import Workers

__all__ = [
    "N_PROMPT",
    "SPARSITY_RANGE",
    "Judged",
    "SparseRecipe",
    "calibrate",
    "distill",
    "distillation_of",
    "is_better",
    "judge",
    "read_channels",
    "run_identity",
]

SPARSITY_RANGE = (0.4, 0.8)
"""Least and largest sparsity that is drawn for a step."""
_JUDGED = (0.5, 0.6, 0.7, 0.8)
N_PROMPT = 64
"""First tokens of a window that are computed with all values; a quarter of shorter windows."""

Windows = NDArray[np.int32]
Judged = Mapping[float, Sequence[Quality]]
"""Quality of each window by sparsity."""


@dataclass(frozen=True, slots=True)
class SparseRecipe(Lengths):
    """How to distill.

    Attributes:
        n_tokens: Tokens to train on.
        sparsity: Sparsity of all steps; None draws one from ``SPARSITY_RANGE`` for each step.
        n_prompt: First tokens of each window that are computed with all values.
        loss: Name of a loss in ``LOSSES``.
        is_straight: Whether gradients pass masks as if nothing was left out (ActiveFlow, Eq 12).
            Without, distilled matrices lose less at each sparsity, most at low ones.
        n_rows: Windows of a step.
        rate: Highest learning rate.
        seed: Seed of the order of windows and of sparsities.
    """

    n_tokens: int
    sparsity: float | None = None
    n_prompt: int = N_PROMPT
    loss: str = "kl"
    is_straight: bool = False
    n_rows: int = 2
    rate: float = 3e-4
    seed: int = 0

    @property
    def judged(self) -> tuple[float, ...]:
        """Sparsities to judge at, with the one that was trained."""
        return tuple(sorted({*_JUDGED, *([] if self.sparsity is None else [self.sparsity])}))

    def sparsity_at(self, step: int) -> float:
        """Return the sparsity of a step."""
        if self.sparsity is not None:
            return self.sparsity
        return float(np.random.default_rng((self.seed, step)).uniform(*SPARSITY_RANGE))

    def mask(self, sparsity: float) -> Mask:
        """Return the mask of products at a sparsity."""
        return Mask(sparsity, self.n_prompt, self.is_straight)


def distill(  # noqa: PLR0913 -- of what, from what, how, with whom, kept where
    student: SparseStudent,
    windows: Windows,
    recipe: SparseRecipe,
    *,
    workers: Workers | None = None,
    kept: Kept | None = None,
    progress: Callable[[int], None] = lambda _n: None,
) -> None:
    """Train the student's matrices.

    Args:
        student: The student, with the matrices of the channel file.
        windows: Text to learn from.
        recipe: How to learn.
        workers: Processes that train together; each calls this function.
        kept: Where to keep the training. It goes on from a checkpoint that exists there.
        progress: Called with the number of tokens just trained on.

    Raises:
        ConfigError: The checkpoint is damaged, or of another run.
        StoreError: The checkpoint cannot be read or written.
    """
    teacher = student.teacher

    def begin(step: int) -> None:
        teacher.mask = recipe.mask(recipe.sparsity_at(step))

    train(
        student,
        Objective(teacher, recipe.loss, recipe.n_prompt),
        Batches(windows, recipe.n_rows, recipe.seed, workers),
        Settings(recipe.n_steps(windows.shape[1]), recipe.rate),
        workers=workers,
        kept=kept,
        begin=begin,
        progress=lambda n, _loss: progress(n),
    )


def judge(
    student: SparseStudent,
    windows: Windows,
    n_prompt: int,
    sparsities: Sequence[float],
    progress: Callable[[int], None] = lambda _n: None,
) -> dict[float, list[Quality]]:
    """Return the quality of each window's answer by sparsity.

    Args:
        student: The student.
        windows: Text that was held out.
        n_prompt: First tokens of each window that are computed with all values.
        sparsities: Sparsities to judge at.
        progress: Called with the number of tokens just evaluated.
    """
    found: dict[float, list[Quality]] = {sparsity: [] for sparsity in sparsities}
    with torch.no_grad():
        for sparsity in sparsities:
            student.teacher.mask = Mask(sparsity, n_prompt)
            for some in batched(windows):
                outputs = student(torch.from_numpy(some[:, :-1].astype(np.int32)))
                found[sparsity] += qualities(student.teacher, outputs, some, n_prompt)
                progress(some.size)
    return found


def read_channels(student: SparseStudent, file: ChannelFile) -> None:
    """Let the student compute with the matrices and shares of a channel file, as stored there.

    Raises:
        StoreError: The file cannot be read, is damaged, or lacks a matrix of the student.
    """
    shares = {channels.operand: channels.shares for channels in file.operands.values()}
    student.teacher.share_by(shares)
    names = set()
    for name, values in matrices_in(file):
        student.load({name: values})
        names.add(name)
    if names != set(student.names):
        raise StoreError(f"{file.path} has other matrices than the model.")
    student.is_rounded = False


def calibrate(
    student: SparseStudent,
    windows: Windows,
    shares: Shares,
    n_prompt: int,
    progress: Callable[[int], None] = lambda _n: None,
) -> Calibration:
    """Measure the magnitudes that each operand reads in answers.

    The threshold of each sparsity is measured with that sparsity, on another window.

    Args:
        student: The student.
        windows: Text; one window is used for each sparsity.
        shares: Shares of the channel file's operands, which the student leaves out.
        n_prompt: First tokens of each window that are computed with all values.
        progress: Called with the number of tokens just evaluated.
    """
    thresholds: dict[Operand, list[float]] = {operand: [] for operand in shares}
    means: dict[Operand, list[NDArray[np.float32]]] = {operand: [] for operand in shares}
    for number, sparsity in enumerate(SPARSITIES):
        window = windows[[number % len(windows)]]
        student.teacher.mask = Mask(sparsity, n_prompt)
        for operand, sizes in _sizes(student, window, list(shares), n_prompt):
            thresholds[operand].append(float(np.quantile(sizes, shares[operand][number])))
            means[operand].append(sizes.mean(0))
        progress(window.size)
    return {
        operand: Activity(
            np.maximum.accumulate(np.array(thresholds[operand], np.float32)),
            np.mean(means[operand], axis=0),
            share,
        )
        for operand, share in shares.items()
    }


def distillation_of(
    student: SparseStudent, recipe: SparseRecipe, tensors: Mapping[str, TensorInfo]
) -> Distillation:
    """Return the student's matrices as the channel file stores them.

    Args:
        student: The student.
        recipe: How it learned.
        tensors: Tensors of the model.
    """

    def read(name: str) -> tuple[TensorInfo, Bytes]:
        return stored(tensors[name], student.grid(name))

    digest = hashlib.blake2b(digest_size=16)
    for name in student.names:
        digest.update(read(name)[1].data)
    least = most = recipe.sparsity
    if least is None or most is None:
        least, most = SPARSITY_RANGE
    return Distillation(Distilled(digest.hexdigest(), recipe.n_tokens, (least, most)), read)


def is_better(before: Judged, after: Judged) -> bool:
    """Return whether predictions are nearer to the whole model's, beyond chance."""
    gains = np.mean(
        [[b.kl - a.kl for b, a in zip(before[one], after[one], strict=True)] for one in before],
        axis=0,
    )
    return improves(gains)


def run_identity(model: str, windows: Windows, shares: Shares, recipe: SparseRecipe) -> str:
    """Return the SHA-256 of everything that the training depends on.

    Args:
        model: Digest of the model file.
        windows: Text to learn from.
        shares: Shares of the channel file's operands.
        recipe: How to learn.
    """
    text = np.ascontiguousarray(windows, "<i4").tobytes()
    about = {
        "model": model,
        "text": [hashlib.sha256(text).hexdigest(), *windows.shape],
        "shares": np.concatenate(list(shares.values())).tolist(),
        "recipe": asdict(recipe),
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


# -- inside --------------------------------------------------------------------------------------


def _sizes(
    student: SparseStudent, window: Windows, operands: Sequence[Operand], n_prompt: int
) -> list[tuple[Operand, NDArray[np.float32]]]:
    """Return the magnitudes that each operand reads in an answer, ``(n_tokens, n_channels)``."""
    found = []
    with torch.no_grad():
        x: Tensor = student.teacher.embed(window)
        for layer in range(student.teacher.blocks.n_layers):
            x, seen = student.teacher.operands(layer, student.weights(layer), x)
            for operand in operands:
                if operand.layer == layer:
                    name = operand.weights[0].split(".")[2]
                    found.append((operand, seen[name][0, n_prompt:].abs().cpu().numpy()))
        student.teacher.forget()
    return found
