"""Drift of a model's predictions on real text when plugins store its contexts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from llmaas_eval.data import packaged_chats
from llmaas_patches.internals import decode_all
from llmaas_plugins.chats.exports import load_conversations
from llmaas_plugins.model.forward import log_softmax

__all__ = ["Drift", "conversation_texts", "drift", "read"]

_OTHER = [1, *range(300, 320)]
_STEP = 23


class Drift(NamedTuple):
    """Comparison of our predictions with vanilla's at the same positions.

    Attributes:
        perplexity_ratio: Our perplexity over vanilla's.
        kl: Mean Kullback-Leibler divergence of our distribution from vanilla's, in nats.
        top1: Share of positions whose most likely token is the same.
    """

    perplexity_ratio: float
    kl: float
    top1: float


def conversation_texts(llama: Any, n_tokens: int) -> list[list[int]]:
    """Return the first ``n_tokens`` tokens of each packaged conversation."""
    texts = []
    for path in packaged_chats():
        for talk in load_conversations(path):
            lines = [f"{m.role.capitalize()}: {m.content}\n" for m in talk.messages]
            texts.append(llama.tokenize("".join(lines).encode())[:n_tokens])
    return texts


def read(llama: Any, text: Sequence[int], n_last: int, n_swaps: int) -> NDArray[np.float64]:
    """Return log probabilities at the last ``n_last`` positions, shape ``(n_last, n_vocab)``.

    The text before those positions is evaluated in ``n_swaps`` steps. After each step another
    context is evaluated, so that the plugins store the text and restore it for the next step.
    """
    n_prompt = len(text) - n_last - 1
    for i in reversed(range(n_swaps)):
        _ask(llama, text[: n_prompt - _STEP * i])
        _ask(llama, _OTHER)
    _ask(llama, text[:n_prompt])
    return _log_probabilities(llama, n_prompt, text[n_prompt:-1])


def drift(
    texts: Sequence[Sequence[int]],
    vanilla: Sequence[NDArray[np.float64]],
    ours: Sequence[NDArray[np.float64]],
) -> Drift:
    """Compare log probabilities that ``read`` returned for the same texts."""
    targets = np.concatenate([t[-len(rows) :] for t, rows in zip(texts, vanilla, strict=True)])
    a, b, i = np.concatenate(vanilla), np.concatenate(ours), np.arange(len(targets))
    return Drift(
        float(np.exp((a[i, targets] - b[i, targets]).mean())),
        float((np.exp(a) * (a - b)).sum(axis=1).mean()),
        float((a.argmax(axis=1) == b.argmax(axis=1)).mean()),
    )


def _ask(llama: Any, tokens: Sequence[int]) -> None:
    generator = llama.generate(list(tokens), temp=0.0)
    next(generator)
    generator.close()


def _log_probabilities(llama: Any, n_past: int, batch: Sequence[int]) -> NDArray[np.float64]:
    decode_all(llama, batch, n_past)
    rows = llama_cpp.llama_get_logits(llama.ctx)
    logits = np.ctypeslib.as_array(rows, shape=(len(batch), llama.n_vocab()))
    return log_softmax(logits.astype(np.float64))
