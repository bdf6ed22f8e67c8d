"""Drafts on an engine that is already made, and what its batches cost.

``Llama(..., draft_model=...)`` keeps the logits of every token, prompt included: the output matrix
is multiplied for each, and a context of ``n_ctx`` tokens needs ``n_ctx`` × ``n_vocab`` floats of
memory. (Without ``logits_all=True`` it also fails beyond ``n_batch`` tokens: its array has that
many rows.) Yet only a batch with proposed tokens needs more than its last row. Nor does it keep
proposals within ``n_ctx``: the engine's own is rounded up, and a full context is not noticed.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from llama_cpp import Llama, llama_cpp

from llmaas_plugins.knn_lm.drafts import DatastoreDraft

__all__ = ["attach", "keeps_tokens", "measured_costs"]

BATCH_SIZES = (1, 2, 4, 8, 16)
_N_ROUNDS = 5


def attach(llama: Llama, draft: DatastoreDraft) -> None:
    """Let ``llama`` ask ``draft`` from its next call on, at no cost but the drafts' own.

    Args:
        llama: An engine made without a draft model.
        draft: Belongs to it from now on.

    Raises:
        ValueError: The engine cannot take back proposed tokens, or not hold them.
    """
    largest = max(draft.costs)
    if reason := _unsupported(llama, largest):
        raise ValueError(f"no drafts: {reason}")
    if "set_batch" not in vars(llama._batch):
        llama._batch.set_batch = _with_every_row(llama)
    draft.n_ctx = min(llama.n_ctx(), len(llama.input_ids))
    llama.draft_model = draft


def _with_every_row(llama: Llama) -> Callable[[Sequence[int], int, bool], None]:
    """``set_batch`` of the engine's batch, which keeps all rows of what may have proposals.

    It does not keep alive the engine that it is a part of, nor a draft that was taken off.
    """
    engine, set_batch = weakref.ref(llama), llama._batch.set_batch

    def with_every_row(batch: Sequence[int], n_past: int, logits_all: bool) -> None:
        draft = getattr(engine(), "draft_model", None)
        is_small = isinstance(draft, DatastoreDraft) and len(batch) <= max(draft.costs)
        set_batch(batch, n_past, logits_all or is_small)

    return with_every_row


def measured_costs(llama: Llama, sizes: Iterable[int] = BATCH_SIZES) -> dict[int, float]:
    """What a batch of each size costs on this engine, in batches of a single token.

    Takes about a hundred tokens' time. The engine must be new, and is left so.

    Args:
        llama: With ``logits_all``, or ``attach`` called: output rows are part of the cost.
        sizes: Batch sizes to measure, 1 among them.
    """
    sizes = sorted(sizes)
    rounds = [[_seconds(llama, size) for size in sizes] for _ in range(_N_ROUNDS + 1)]
    best = np.maximum.accumulate(np.min(rounds[1:], axis=0))  # no size is faster than a smaller one
    return dict(zip(sizes, (best / best[0]).tolist(), strict=True))


def _seconds(llama: Llama, size: int) -> float:
    llama.reset()
    started = time.perf_counter()
    llama.eval([llama.token_bos()] * size)
    elapsed = time.perf_counter() - started
    llama.reset()
    return elapsed


def keeps_tokens(llama: Llama) -> str | None:
    """Return why an engine cannot go back by a few tokens; None: it can."""
    model: Any = llama.model
    has_gaps = llama_cpp.llama_model_n_swa(model) > 0 and not llama.context_params.swa_full
    reasons = {
        "recurrent model: its state cannot drop tokens": llama_cpp.llama_model_is_recurrent(model),
        "hybrid model: its state cannot drop tokens": llama_cpp.llama_model_is_hybrid(model),
        "sliding window without swa_full: tokens of before the draft are gone": has_gaps,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _unsupported(llama: Llama, largest: int) -> str | None:
    if (reason := keeps_tokens(llama)) is not None:
        return reason
    reasons = {
        "the engine has a draft model": llama.draft_model is not None,
        f"n_batch is {llama.n_batch}, and batches of {largest} tokens are to be verified": (
            llama.n_batch < largest
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
