"""Drafts on an engine without the suite: every row of small batches is kept by hand.

``Llama(..., draft_model=...)`` keeps the logits of every token, including the prompt's. Yet only
batches with drafts need more than their last row.
"""

from __future__ import annotations

import time
import weakref

import numpy as np
from llama_cpp import llama_cpp

from llmaas_plugins.knn_lm.drafts.draft_model import DatastoreDraft
from llmaas_plugins.knn_lm.drafts.requirements import most_tokens, obstacle

BATCH_SIZES = (1, 2, 4, 8, 16)
N_ROUNDS = 5


def refusal(llama):
    """Return why the host would make no drafts on this engine (``Engine.can_drop_tokens``)."""
    model = llama.model
    has_gaps = llama_cpp.llama_model_n_swa(model) > 0 and not llama.context_params.swa_full
    reasons = {
        "recurrent model": llama_cpp.llama_model_is_recurrent(model),
        "hybrid model": llama_cpp.llama_model_is_hybrid(model),
        "sliding window without swa_full": has_gaps,
        "the engine has a draft model": llama.draft_model is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def attach(llama, draft):
    """Attach ``draft`` to an engine that no patch serves.

    Raises:
        ValueError: The engine cannot remove drafted tokens, or has no room for them.
    """
    if reason := refusal(llama) or obstacle(llama, draft):
        raise ValueError(f"no drafts: {reason}")
    set_batch, engine = llama._batch.set_batch, weakref.ref(llama)

    def with_rows(batch, n_past, logits_all):
        attached = getattr(engine(), "draft_model", None)
        is_ours = isinstance(attached, DatastoreDraft)
        has_drafts = is_ours and len(batch) <= max(attached.costs)
        set_batch(batch, n_past, logits_all or has_drafts)

    llama._batch.set_batch = with_rows
    draft.n_ctx = most_tokens(llama)
    llama.draft_model = draft


def measured_costs(llama, sizes=BATCH_SIZES):
    """Return the cost of a batch of each size, in units of a single-token batch.

    The engine must be new, and is reset afterwards.
    """
    rounds = [[_seconds(llama, size) for size in sizes] for _ in range(N_ROUNDS + 1)]
    best = np.maximum.accumulate(np.min(rounds[1:], axis=0))  # a larger batch never costs less
    return dict(zip(sizes, (best / best[0]).tolist(), strict=True))


def _seconds(llama, size):
    llama.reset()
    started = time.perf_counter()
    llama.eval([llama.token_bos()] * size)
    elapsed = time.perf_counter() - started
    llama.reset()
    return elapsed
