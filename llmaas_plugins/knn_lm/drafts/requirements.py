"""Requirements of drafts: an engine that can remove tokens, with room for them.

llama-cpp-python does not keep drafts within ``n_ctx``: the engine rounds its own ``n_ctx`` up, and
does not notice a full context.
"""

from __future__ import annotations

from typing import Any

from llama_cpp import Llama, llama_cpp

from llmaas_plugins.knn_lm.drafts.draft_model import DatastoreDraft

__all__ = ["most_tokens", "obstacle", "rollback_obstacle"]


def most_tokens(llama: Llama) -> int:
    """Return how many tokens a context holds together with drafts."""
    return min(llama.n_ctx(), len(llama.input_ids))


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
