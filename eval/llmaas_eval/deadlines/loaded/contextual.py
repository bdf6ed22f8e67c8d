"""Contextual sparsity (Deja Vu) with an oracle: for each token, only the neurons that matter most.

The paper's baseline predicts a token's neurons with a small network, for prompts as well. Here they
are known: those with the largest output, times the norm of its column of weights. Prompts are read
by the whole model. Both are in the baseline's favor. Attention is never sparse.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from llmaas_eval.deadlines.loaded.scoring import Item, Scores, unanswered
from llmaas_eval.prompts.gradient import KeptDecoder
from llmaas_plugins.elastic.torch_model import Weights

__all__ = ["SparseNeurons", "sparse_scores"]


class SparseNeurons(KeptDecoder):
    """Decoder of a prompt and of texts after it, whose MLPs use a share of their neurons.

    Only for models whose layers all see the whole text.
    """

    def __init__(self, path: Path, share: float) -> None:
        """Load a GGUF file.

        Args:
            path: The whole model.
            share: Share of the neurons that each token after the prompt uses.
        """
        super().__init__(path)
        self._n_kept = math.ceil(share * self.blocks.n_ff - 1e-9)
        self._n_prompt, self._lengths = 0, list[int]()

    def log_probabilities(
        self, prompt: Sequence[int], texts: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        """Return what follows a prompt, and what follows each token of each text after it.

        Args:
            prompt: Tokens of the prompt.
            texts: Tokens of the texts, which do not see each other.

        Returns:
            Log probabilities by text, shape ``(1 + n_tokens, n_vocab)``.
        """
        self._n_prompt, self._lengths = len(prompt), [*map(len, texts)]
        tokens = np.array([[*prompt, *itertools.chain(*texts)]], np.int32)
        first, *rest = (
            self.logits(self.run(tokens)[0, len(prompt) - 1 :])
            .log_softmax(-1)
            .split([1, *self._lengths])
        )
        return [torch.cat([first, one]) for one in rest]

    def positions(self, n_tokens: int) -> Tensor:
        """Return the position of each token: every text begins after the prompt."""
        own, ends = torch.arange(n_tokens), itertools.accumulate([self._n_prompt, *self._lengths])
        for start, end in itertools.pairwise(ends):
            own[start:end] -= start - self._n_prompt
        return own

    def visible(self, layer: int, n_tokens: int) -> Tensor:
        """Return whether a token (row) attends to another (column): of its text or the prompt."""
        text = torch.repeat_interleave(torch.tensor([self._n_prompt, *self._lengths]))
        return super().visible(layer, n_tokens) & ((text == 0) | (text == text[:, None]))

    def product(self, layer: int, weights: Weights, name: str, x: Tensor) -> Tensor:
        """Return ``x`` multiplied by a matrix; only the largest neurons' outputs count."""
        if name == "ffn_down" and self._n_kept < self.blocks.n_ff:
            text = x[self._n_prompt :]
            sizes = text.abs() * weights["ffn_down.weight"].norm(dim=0)
            best = sizes.topk(self._n_kept, dim=-1).indices
            kept = torch.zeros_like(text).scatter_(-1, best, text.gather(-1, best))
            x = torch.cat([x[: self._n_prompt], kept])
        return super().product(layer, weights, name, x)


def sparse_scores(
    model: SparseNeurons, items: Sequence[Item], rows: Collection[int], name: str
) -> Scores:
    """Answer some of the questions, as ``scoring.scores`` does.

    Args:
        model: The model.
        items: Questions.
        rows: Indices of the questions to answer.
        name: Label of the progress bar.
    """
    found = unanswered(len(items))
    for i in tqdm(rows, desc=name, unit="question", disable=None):
        logs = _choices(model, items[i])
        found.choice[i] = int(np.argmax(logs))
        found.nats[i] = -logs[items[i].choice]
    return found


# -- inside --------------------------------------------------------------------------------------


def _choices(model: SparseNeurons, item: Item) -> NDArray[np.float64]:
    """Return the mean log probability of each choice's tokens."""
    texts = [[*item.lead, *choice] for choice in item.choices]
    logs = model.log_probabilities(item.prompt, [text[:-1] for text in texts])
    found = []
    for text, after in zip(texts, logs, strict=True):
        own = after[range(len(text)), text]
        found.append(float(own[len(item.lead) :].mean()))
    return np.array(found)
