"""Attaching drafts to an existing engine, and measuring the cost of its batches.

``Llama(..., draft_model=...)`` keeps the logits of every token, including the prompt's. The output
matrix is then multiplied for every token, and a context of ``n_ctx`` tokens needs ``n_ctx`` ×
``n_vocab`` floats of memory. Without ``logits_all=True``, llama-cpp-python also fails beyond
``n_batch`` tokens, because its array has only that many rows. Yet only batches with proposed tokens
need more than their last row.

llama-cpp-python does not keep proposals within ``n_ctx`` either: the engine rounds its own
``n_ctx`` up, and does not notice a full context.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from llama_cpp import Llama, llama_cpp

from llmaas_plugins.knn_lm.drafts.draft_model import DatastoreDraft

__all__ = ["attach", "measured_costs", "most_tokens", "obstacle", "rollback_obstacle"]

BATCH_SIZES = (1, 2, 4, 8, 16)
_N_ROUNDS = 5


def attach(
    llama: Llama, draft: DatastoreDraft, keep_rows: Callable[[Callable[[int], bool]], None]
) -> None:
    """Attach ``draft`` to ``llama`` from its next call on, without the cost of ``logits_all``.

    Args:
        llama: Engine that was made without a draft model.
        draft: Draft model, which belongs to this engine from now on.
        keep_rows: ``Engine.keep_rows`` of this engine.

    Raises:
        ValueError: The engine cannot remove proposed tokens, or has no room for them.
    """
    if reason := obstacle(llama, draft):
        raise ValueError(f"no drafts: {reason}")
    keep_rows(_may_propose(llama))
    draft.n_ctx = most_tokens(llama)
    llama.draft_model = draft


def most_tokens(llama: Llama) -> int:
    """Return how many tokens a context holds together with drafts."""
    return min(llama.n_ctx(), len(llama.input_ids))


def _may_propose(llama: Llama) -> Callable[[int], bool]:
    """Return a function of a batch's size: whether the batch may contain proposals.

    The function does not keep the engine alive, nor a draft that was detached from it.
    """
    engine = weakref.ref(llama)

    def may_propose(n_tokens: int) -> bool:
        draft = getattr(engine(), "draft_model", None)
        return isinstance(draft, DatastoreDraft) and n_tokens <= max(draft.costs)

    return may_propose


def measured_costs(llama: Llama, sizes: Iterable[int] = BATCH_SIZES) -> dict[int, float]:
    """Measure the cost of a batch of each size, in units of a single-token batch.

    This takes about as long as a hundred tokens. The engine must be new, and is reset afterwards.

    Args:
        llama: Engine with ``logits_all`` or ``attach``, so that the cost includes output rows.
        sizes: Batch sizes to measure; must include 1.
    """
    sizes = sorted(sizes)
    rounds = [[_seconds(llama, size) for size in sizes] for _ in range(_N_ROUNDS + 1)]
    best = np.maximum.accumulate(np.min(rounds[1:], axis=0))  # a larger batch never costs less
    return dict(zip(sizes, (best / best[0]).tolist(), strict=True))


def _seconds(llama: Llama, size: int) -> float:
    llama.reset()
    started = time.perf_counter()
    llama.eval([llama.token_bos()] * size)
    elapsed = time.perf_counter() - started
    llama.reset()
    return elapsed


def rollback_obstacle(llama: Llama) -> str | None:
    """Return why an engine cannot remove its last few tokens, or None if it can."""
    model: Any = llama.model
    has_gaps = llama_cpp.llama_model_n_swa(model) > 0 and not llama.context_params.swa_full
    reasons = {
        "recurrent model: its state cannot drop tokens": llama_cpp.llama_model_is_recurrent(model),
        "hybrid model: its state cannot drop tokens": llama_cpp.llama_model_is_hybrid(model),
        "sliding window without swa_full: tokens from before the draft are gone": has_gaps,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def obstacle(llama: Llama, draft: DatastoreDraft) -> str | None:
    """Return why an engine cannot verify drafts, or None if it can."""
    largest = max(draft.costs)
    if (reason := rollback_obstacle(llama)) is not None:
        return reason
    reasons = {
        "the engine has a draft model": llama.draft_model is not None,
        f"n_batch is {llama.n_batch}, but drafts need batches of {largest} tokens": (
            llama.n_batch < largest
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
