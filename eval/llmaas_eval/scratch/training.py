"""Train a small model from scratch, on the text that the packaged model was trained on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from llmaas_eval.models import Shape, copy_tokenizer, open_writer, write_metadata
from llmaas_eval.trainable import Trainable
from llmaas_eval.weights import finish_f16, write_f16
from llmaas_plugins.training.batches import Batches
from llmaas_plugins.training.device import learning_device
from llmaas_plugins.training.trainer import Kept, Settings, train

__all__ = ["train_from_scratch"]

_N_ROWS, _RATE, _SPREAD = 8, 3e-3, 0.02
"""Windows of a step, highest learning rate, and spread of the first weights: the reference's."""

Windows = NDArray[np.int32]


def train_from_scratch(shape: Shape, windows: Windows, path: Path, seed: int) -> Path:
    """Train a model with the packaged model's vocabulary, once over the text.

    A run that was stopped goes on, and one that is complete is not repeated.

    Args:
        shape: Shape of the model.
        windows: Text to learn from, shape ``(n_windows, n_tokens)``.
        path: F16 GGUF file to write.
        seed: Seed of the first weights and of the order of the windows.

    Returns:
        ``path``.
    """
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    first = _write_first(shape, path.with_suffix(".first"), seed)
    model = Trainable(first, learning_device())
    batches = Batches(windows, _N_ROWS, seed)
    settings = Settings(max(1, len(windows) // _N_ROWS), _RATE)
    kept = Kept(path.with_suffix(".npz"), _identity(shape, windows, seed))
    total = settings.n_steps * batches.n_tokens
    with tqdm(desc=path.stem, total=total, unit="token", unit_scale=True, disable=None) as bar:

        def progress(n: int, loss: float) -> None:
            bar.update(n)
            bar.set_postfix(loss=f"{loss:.3f}")

        train(_Predicting(model), _loss, batches, settings, kept=kept, progress=progress)
    write_f16(GGUFReader(first), model.arrays(), path)
    first.unlink()
    kept.path.unlink(missing_ok=True)
    return path


# -- inside --------------------------------------------------------------------------------------


class _Predicting(nn.Module):
    """Function from windows to logits, on the model's device."""

    def __init__(self, model: Trainable) -> None:
        super().__init__()
        self.model = model

    def forward(self, windows: Tensor) -> Tensor:
        """Return logits ``(n_windows, n_tokens, n_vocab)``."""
        logits: Tensor = self.model(windows.to(self.model.device))
        return logits


def _loss(outputs: Tensor, windows: Windows) -> tuple[float, Tensor]:
    """Return the mean loss of the next tokens, and its gradient."""
    logits = outputs.detach().requires_grad_()
    after = torch.from_numpy(windows[:, 1:].astype(np.int64)).to(logits.device)
    loss = functional.cross_entropy(logits.flatten(0, 1), after.flatten())
    (gradient,) = torch.autograd.grad(loss, logits)
    return float(loss.detach()), gradient


def _write_first(shape: Shape, path: Path, seed: int) -> Path:
    """Write a model with random weights and one matrix for embedding and output."""
    writer = open_writer(path, "llama")
    write_metadata(writer, shape, path.stem)
    n_vocab = copy_tokenizer(writer)
    writer.add_vocab_size(n_vocab)
    return finish_f16(writer, _first_weights(shape, n_vocab, seed), path)


def _first_weights(shape: Shape, n_vocab: int, seed: int) -> Mapping[str, NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    d, kv, ff = shape.n_embd, shape.n_head_kv * shape.head_dim, shape.n_ff
    before_sum = _SPREAD / (2 * shape.n_layer) ** 0.5

    def matrix(n_rows: int, n_columns: int, spread: float = _SPREAD) -> NDArray[np.float32]:
        return spread * rng.standard_normal((n_rows, n_columns), np.float32)

    found = {"token_embd.weight": matrix(n_vocab, d), "output_norm.weight": np.ones(d, np.float32)}
    for i in range(shape.n_layer):
        layer = {
            "attn_norm": np.ones(d, np.float32),
            "attn_q": matrix(d, d),
            "attn_k": matrix(kv, d),
            "attn_v": matrix(kv, d),
            "attn_output": matrix(d, d, before_sum),
            "ffn_norm": np.ones(d, np.float32),
            "ffn_gate": matrix(ff, d),
            "ffn_up": matrix(ff, d),
            "ffn_down": matrix(d, ff, before_sum),
        }
        found |= {f"blk.{i}.{name}.weight": values for name, values in layer.items()}
    return found


def _identity(shape: Shape, windows: Windows, seed: int) -> str:
    """Return the SHA-256 of everything that the run depends on."""
    text = hashlib.sha256(np.ascontiguousarray(windows, "<i4").tobytes()).hexdigest()
    about = [astuple(shape), text, windows.shape, _N_ROWS, _RATE, _SPREAD, seed]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()
