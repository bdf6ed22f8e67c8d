"""Features of a prompt before it is evaluated: plain counts, and a tiny model's states."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmaas_plugins.short_prompts.encoder.body import Body, layer_of
from llmaas_plugins.short_prompts.encoder.word_pieces import WordPieces
from llmaas_plugins.short_prompts.scorer import Prompt
from llmaas_plugins.training.bert import Bert

__all__ = ["N_BOTTOM", "Encoded", "bottom_of", "pooled"]

N_BOTTOM = 3
"""Layers that the tiny model's two tops share, and that are never trained (half, as in §3.3)."""
_N_TAIL = 24
"""Pieces of the end, which is about the question."""
_SHARES = (0.7, 0.5, 0.3)
_FORMS = ("who", "what", "when", "where", "how", "which", "?")
_DIGIT, _DIGITS = re.compile(r"\d"), 4


class Encoded:
    """The pretrained encoder in torch, which tells the features of prompts."""

    def __init__(self, body: Body) -> None:
        """Copy the body's weights."""
        self._pieces, self._most = WordPieces(body.vocabulary), body.n_positions - 2
        self._parts = {"bottom": Bert(bottom_of(body), 0, 1), "top": Bert(body, 0, 1)}

    def ids(self, prompt: Prompt) -> NDArray[np.int32]:
        """Return the last pieces of a prompt that fit into a window, with its marks."""
        pieces = self._pieces
        ids = pieces.of(prompt.words).ids[-self._most :]
        return np.concatenate([[pieces.begin], ids, [pieces.end]]).astype(np.int32)

    def features(self, prompt: Prompt, scores: NDArray[np.float32]) -> Mapping[str, list[Any]]:
        """Return numbers by where they come from, and the ids of the pieces.

        Args:
            prompt: The prompt.
            scores: The score head's probability of each word.
        """
        ids = self.ids(prompt)
        window = torch.from_numpy(ids[None].astype(np.int64))
        found = {"ids": ids.tolist(), "plain": plain(prompt), "kept": kept(prompt, scores)}
        with torch.no_grad():
            for name, bert in self._parts.items():
                (states,) = pooled(bert.outputs(window), torch.ones_like(window, dtype=torch.bool))
                found[name] = np.round(states.numpy().astype(np.float64), _DIGITS).tolist()
        return found


def bottom_of(body: Body) -> Body:
    """Return an encoder of the shared layers only."""
    weights = {name: one for name, one in body.weights.items() if layer_of(name) < N_BOTTOM}
    return Body(weights, body.vocabulary, body.digest)


def pooled(states: Tensor, is_piece: Tensor) -> Tensor:
    """Return the mean state of all pieces, and that of the last ones, ``(n, 2 * n_embd)``.

    Args:
        states: States of pieces, ``(n, n_pieces, n_embd)``.
        is_piece: Whether a place has a piece, and is no padding, ``(n, n_pieces)``.
    """
    n_after = is_piece.flip(1).cumsum(1).flip(1)  # with the piece itself
    parts = [is_piece, is_piece & (n_after <= _N_TAIL)]
    means = [(states * part[..., None]).sum(1) / part.sum(1, keepdim=True) for part in parts]
    return torch.cat(means, dim=1)


def plain(prompt: Prompt) -> list[float]:
    """Return lengths, shares of numbers, names and lines, and the question's form."""
    words, question = prompt.words, "".join(prompt.words[prompt.question :]).lower()
    n = max(len(words), 1)
    found = [
        float(np.log(len(prompt.tokens))),
        len(prompt.tokens) / n,
        (len(prompt.tokens) - int(prompt.starts[prompt.question])) / len(prompt.tokens),
        sum(bool(_DIGIT.search(word)) for word in words) / n,
        sum(word.strip()[:1].isupper() for word in words) / n,
        sum(word.count("\n") for word in words) / n,
        len({word.strip().lower() for word in words}) / n,
        float(bool(_DIGIT.search(question))),
    ]
    return [*found, *(float(form in question) for form in _FORMS)]


def kept(prompt: Prompt, scores: NDArray[np.float32]) -> list[float]:
    """Return the score head's mean probability, and how much of it the best words hold."""
    order = np.sort(scores.astype(np.float64))[::-1]
    total = max(float(order.sum()), 1e-9)
    held = [float(order[: int(share * len(order))].sum()) / total for share in _SHARES]
    end = scores[prompt.question :]
    return [float(order.mean()), float(end.mean()) if len(end) else 0.0, *held]
