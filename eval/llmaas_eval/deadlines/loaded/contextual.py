"""Contextual sparsity (Deja Vu) with an oracle: for each token, only the neurons that matter most.

The paper's baseline predicts a token's neurons with a small network, for prompts as well. Here they
are known: those whose outputs change the MLP's sum most. Prompts are read by the whole model. So
this one is better than any that can be built. Attention is never sparse.
"""

from __future__ import annotations

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

_MOST_TOKENS = 4096
"""Tokens of a batch."""


class SparseNeurons(KeptDecoder):
    """Decoder that computes the MLPs of an answer's tokens with a share of their neurons."""

    def __init__(self, path: Path, share: float) -> None:
        """Load a GGUF file.

        Args:
            path: The whole model.
            share: Share of the neurons that a token uses.
        """
        super().__init__(path)
        self._n_kept = math.ceil(share * self.blocks.n_ff - 1e-9)
        self.n_prompt = 0  # the first tokens of each text, which use all neurons

    def product(self, layer: int, weights: Weights, name: str, x: Tensor) -> Tensor:
        """Return ``x`` multiplied by a matrix; only the largest neurons' outputs count."""
        if name == "ffn_down" and self._n_kept < self.blocks.n_ff:
            answer = x[..., self.n_prompt :, :]
            sizes = answer.abs() * weights["ffn_down.weight"].norm(dim=0)
            best = sizes.topk(self._n_kept, dim=-1).indices
            kept = torch.zeros_like(answer).scatter_(-1, best, answer.gather(-1, best))
            x = torch.cat([x[..., : self.n_prompt, :], kept], -2)
        return super().product(layer, weights, name, x)

    def log_probabilities(self, prompt: Sequence[int], heads: Sequence[Sequence[int]]) -> Tensor:
        """Return what follows a prompt, and each token of some texts after it.

        Args:
            prompt: Tokens of the prompt.
            heads: Tokens of the texts.

        Returns:
            Log probabilities, shape ``(n_texts, n_longest + 1, n_vocab)``. Rows after a text's end
            mean nothing.
        """
        self.n_prompt, n_longest = len(prompt), max(map(len, heads))
        rows = [[*prompt, *head, *[0] * (n_longest - len(head))] for head in heads]
        windows, found = np.array(rows, np.int32), []
        step = max(1, _MOST_TOKENS // windows.shape[1])
        with torch.no_grad():
            for start in range(0, len(rows), step):
                x = self.embed(windows[start : start + step])
                for layer in range(self.blocks.n_layers):
                    x = self.block(layer, self.weights(layer), x)
                own = x[:, len(prompt) - 1 :]
                logits = self.logits(own.flatten(0, 1))
                found.append(logits.log_softmax(-1).unflatten(0, own.shape[:2]))
        return torch.cat(found)


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
    heads = [*dict.fromkeys(tuple(text[:-1]) for text in texts)]
    logs = model.log_probabilities(item.prompt, heads)
    found = []
    for text in texts:
        own = logs[heads.index(tuple(text[:-1])), range(len(text)), text]
        found.append(float(own[len(item.lead) :].mean()))
    return np.array(found)
