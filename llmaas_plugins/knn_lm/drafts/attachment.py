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
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from llama_cpp import Llama, llama_cpp

from llmaas_plugins.knn_lm.drafts.draft_model import DatastoreDraft

__all__ = ["attach", "measured_costs", "rollback_obstacle"]

BATCH_SIZES = (1, 2, 4, 8, 16)
_N_ROUNDS = 5


def attach(llama: Llama, draft: DatastoreDraft) -> None:
    """Attach ``draft`` to ``llama`` from its next call on, without the cost of ``logits_all``.

    Args:
        llama: Engine that was made without a draft model.
        draft: Draft model, which belongs to this engine from now on.

    Raises:
        ValueError: The engine cannot remove proposed tokens, or has no room for them.
    """
    largest = max(draft.costs)
    if reason := _unsupported(llama, largest):
        raise ValueError(f"no drafts: {reason}")
    if "set_batch" not in vars(llama._batch):
        llama._batch.set_batch = _with_every_row(llama)
    draft.n_ctx = min(llama.n_ctx(), len(llama.input_ids))
    llama.draft_model = draft


def _with_every_row(llama: Llama) -> Callable[[Sequence[int], int, bool], None]:
    """Return a ``set_batch`` that keeps all rows of batches that may contain proposals.

    The function does not keep the engine alive, nor a draft that was detached from it.
    """
    engine, set_batch = weakref.ref(llama), llama._batch.set_batch

    def with_every_row(batch: Sequence[int], n_past: int, logits_all: bool) -> None:
        draft = getattr(engine(), "draft_model", None)
        is_small = isinstance(draft, DatastoreDraft) and len(batch) <= max(draft.costs)
        set_batch(batch, n_past, logits_all or is_small)

    return with_every_row


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


def _unsupported(llama: Llama, largest: int) -> str | None:
    if (reason := rollback_obstacle(llama)) is not None:
        return reason
    reasons = {
        "the engine has a draft model": llama.draft_model is not None,
        f"n_batch is {llama.n_batch}, but drafts need batches of {largest} tokens": (
            llama.n_batch < largest
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
