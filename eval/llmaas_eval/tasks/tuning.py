"""Tune a copy of a model to tasks, on questions with their answers.

The predictions of answers weigh more than those of prompts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from llmaas_eval.tasks.questions import Task, asked, mixed
from llmaas_eval.trainable import Trainable
from llmaas_eval.weights import write_f16
from llmaas_plugins.model.digest import file_digest
from llmaas_plugins.model.quantize import quantize
from llmaas_plugins.training.batches import Batches
from llmaas_plugins.training.trainer import Kept, Settings, train

__all__ = ["task_windows", "tune"]

_WINDOW, _N_ROWS, _RATE = 128, 16, 1e-3
_IN_PROMPT, _IN_ANSWER = 1, 25
"""Weights of predictions."""

Windows = NDArray[np.int32]
"""Tokens and the weights of their predictions, shape ``(n_windows, n_tokens, 2)``."""


def tune(model: Path, tasks: Mapping[str, Task], n_tokens: int, folder: Path, seed: int) -> Path:
    """Write a copy of a model that was tuned to tasks, in Q8_0.

    A run that was stopped goes on, and one that is complete is not repeated.

    Args:
        model: GGUF file of the llama architecture.
        tasks: Tasks.
        n_tokens: Tokens to train on.
        folder: Folder for the copy and for progress.
        seed: Seed of the order of the questions.

    Returns:
        The copy's path.
    """
    windows = task_windows(model, tasks, max(_N_ROWS, n_tokens // _WINDOW), seed)
    identity = _identity(model, windows)
    path = folder / f"tuned-{identity[:16]}.gguf"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    tuned = _Tuned(model)
    batches = Batches(windows, _N_ROWS, seed)
    settings = Settings(len(windows) // _N_ROWS, _RATE)
    kept = Kept(path.with_suffix(".npz"), identity)
    total = settings.n_steps * batches.n_tokens
    with tqdm(desc="tuning", total=total, unit="token", unit_scale=True, disable=None) as bar:

        def progress(n: int, loss: float) -> None:
            bar.update(n)
            bar.set_postfix(loss=f"{loss:.3f}")

        train(tuned, _loss, batches, settings, kept=kept, progress=progress)
    whole = write_f16(GGUFReader(model), tuned.model.arrays(), path.with_suffix(".f16"))
    quantize(whole, path, "Q8_0")
    whole.unlink()
    kept.path.unlink()
    return path


def task_windows(model: Path, tasks: Mapping[str, Task], n_windows: int, seed: int) -> Windows:
    """Return windows of questions with their answers; each begins with the BOS token.

    Args:
        model: GGUF file with the vocabulary.
        tasks: Tasks.
        n_windows: Number of windows.
        seed: Seed of the order of the questions.
    """
    from llama_cpp import Llama

    pairs = list[tuple[int, int]]()
    n_each = _WINDOW - 1
    with contextlib.closing(Llama(str(model), vocab_only=True, verbose=False)) as llama:
        bos = llama.token_bos()
        questions = mixed(tasks, seed)
        while len(pairs) < n_windows * n_each:
            one = asked(*next(questions), lambda text: llama.tokenize(text.encode(), add_bos=False))
            pairs += [(token, _IN_PROMPT) for token in one.prompt]
            pairs += [(token, _IN_ANSWER) for token in (*one.lead, one.choices[one.choice])]
            pairs += [(token, _IN_PROMPT) for token in one.end]
    rows = np.array(pairs[: n_windows * n_each], np.int32).reshape(n_windows, n_each, 2)
    first = np.full((n_windows, 1, 2), (bos, _IN_PROMPT), np.int32)
    return np.concatenate((first, rows), axis=1)


# -- inside --------------------------------------------------------------------------------------


class _Tuned(nn.Module):
    """Function from windows to logits.

    Attributes:
        model: Model that learns.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.model = Trainable(path)

    def forward(self, windows: Tensor) -> Tensor:
        """Return logits ``(n_windows, n_tokens, n_vocab)``."""
        logits: Tensor = self.model(windows[..., 0])
        return logits


def _loss(outputs: Tensor, windows: Windows) -> tuple[float, Tensor]:
    """Return the weighted mean loss of the next tokens, and its gradient."""
    logits = outputs.detach().requires_grad_()
    after = torch.from_numpy(windows[:, 1:].astype(np.int64))
    targets = after[..., 0].flatten()
    losses = functional.cross_entropy(logits.flatten(0, 1), targets, reduction="none")
    weights = after[..., 1].flatten()
    loss = (losses * weights).sum() / weights.sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    return float(loss.detach()), gradient


def _identity(model: Path, windows: Windows) -> str:
    """Return the SHA-256 of everything that the run depends on."""
    text = hashlib.sha256(np.ascontiguousarray(windows, "<i4").tobytes()).hexdigest()
    about = [file_digest(model), text, windows.shape, _N_ROWS, _RATE]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()
