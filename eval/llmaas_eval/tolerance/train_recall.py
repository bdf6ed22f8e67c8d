"""Train a copy of the reference model to recall: ``python -m llmaas_eval.tolerance.train_recall``.

The reference model cannot recall late what it was told early. A few thousand steps on generated
text (``recall``) change that. A quarter of the rows are the model's original training text, so that
its language stays.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from llmaas_eval.data import read_documents
from llmaas_eval.tolerance.recall import make_training
from llmaas_eval.trainable import Trainable
from llmaas_eval.weights import write_f16
from llmaas_plugins.reference_model import reference_model_path

__all__ = ["main"]

Batch = tuple[Tensor, Tensor]
"""Tokens, and the weight of each position's prediction; both of shape ``(n, n_tokens)``."""


_DISTRACTION, _ANSWER = 0.2, 5.0
"""Weights of predictions in recall text: of distraction, which ordinary rows teach, and answers."""


class Texts:
    """Ordinary text and recall text as tokens."""

    def __init__(self, tokenizer: Any, documents: Sequence[str], seed: int) -> None:
        """Tokenize ``documents``."""
        self._llama, self._random = tokenizer, random.Random(seed)  # noqa: S311 - texts, no secret
        self._chats = [
            lines
            for text in documents
            if len(lines := [line for line in text.splitlines() if _is_turn(line)]) > 3
        ]
        self._ordinary = np.concatenate([self._tokens(f"{text}\n") for text in tqdm(documents)])

    def batch(self, n_tokens: int) -> Batch:
        """Return a batch with a quarter of ordinary rows; tokens of answers weigh more."""
        n = _BATCH // n_tokens
        rows = [
            self._recall(n_tokens) if self._random.random() < 0.75 else self._plain(n_tokens)
            for _ in range(n)
        ]
        tokens, weights = zip(*rows, strict=True)
        return torch.from_numpy(np.stack(tokens)), torch.from_numpy(np.stack(weights))

    def _plain(self, n_tokens: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        start = self._random.randrange(len(self._ordinary) - n_tokens)
        return self._ordinary[start : start + n_tokens], np.ones(n_tokens, np.float32)

    def _recall(self, n_tokens: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        tokens, weights = [], []
        gap = 0 if n_tokens < 256 else 3 * n_tokens // 2
        for prompt, answer in make_training(self._random, self._chats, 5 * n_tokens, gap):
            piece = self._tokens(prompt + answer)
            weight = np.full(len(piece), _DISTRACTION, np.float32)
            weight[len(self._tokens(prompt)) : -2] = _ANSWER  # without full stop and line end
            tokens.append(piece)
            weights.append(weight)
        return np.concatenate(tokens)[:n_tokens], np.concatenate(weights)[:n_tokens]

    def _tokens(self, text: str) -> NDArray[np.int64]:
        return np.array(self._llama.tokenize(text.encode(), add_bos=False), np.int64)


def _is_turn(line: str) -> bool:
    return line.startswith(("User: ", "Assistant: "))


_BATCH, _RATE = 2048, 1.5e-3


def train(model: Trainable, texts: Texts, lengths: Sequence[int], minutes: float) -> None:
    """Train for ``minutes``, an equal part of the time on rows of each of ``lengths``.

    The model learns to recall on short rows, where facts are near.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=0, betas=(0.9, 0.95), weight_decay=0.01, fused=True
    )
    started, step, rights = time.monotonic(), 0, [0.0]
    with tqdm(total=100, unit="%", mininterval=5) as bar:
        while (part := (time.monotonic() - started) / (60 * minutes)) < 1:
            rate = _RATE * min(1.0, (step + 1) / 50) * max(0.03, min(1.0, (1 - part) / 0.5))
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss, right = _step(model, *texts.batch(lengths[int(part * len(lengths))]))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            rights = [*rights[-19:], right]
            bar.update(100 * part - bar.n)
            bar.set_postfix(step=step, loss=f"{loss.item():.2f}", right=f"{np.nanmean(rights):.2f}")


def _step(model: Trainable, tokens: Tensor, weights: Tensor) -> tuple[Tensor, float]:
    """Return the weighted loss, and the share of the answers' tokens that are right."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens[:, :-1])
    target, weight = tokens[:, 1:].flatten(), weights[:, 1:].flatten()
    logits = logits.float().flatten(0, 1)
    losses = functional.cross_entropy(logits, target, reduction="none")
    answers = weight == _ANSWER
    right = (logits.argmax(-1) == target)[answers].float().mean().item()
    return (losses * weight).sum() / weight.sum(), right


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the model and write it."""
    parser = argparse.ArgumentParser(prog="train_recall", description=__doc__)
    parser.add_argument("--model", type=Path, default=reference_model_path(), help="GGUF, any type")
    parser.add_argument("--text", type=Path, required=True, help="training text, .txt.xz")
    parser.add_argument("--minutes", type=float, default=40)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512, 1024])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--megabytes", type=float, default=8, help="megabytes of text to read")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    documents = read_documents(options.text, int(options.megabytes * 1e6))
    torch.set_num_threads(options.threads)
    model = Trainable(options.model)
    from llama_cpp import Llama

    with contextlib.closing(Llama(str(options.model), vocab_only=True, verbose=False)) as engine:
        texts = Texts(engine, documents, options.seed)
        train(model, texts, options.lengths, options.minutes)
    write_f16(GGUFReader(options.model), model.arrays(), options.out)


if __name__ == "__main__":
    main()
