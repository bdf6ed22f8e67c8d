"""Requirements of drafts that the host does not check: room for them.

llama-cpp-python does not keep drafts within ``n_ctx``: the engine rounds its own ``n_ctx`` up, and
does not notice a full context.
"""

from __future__ import annotations

from llama_cpp import Llama

from llmaas_plugins.knn_lm.drafts.draft_model import DatastoreDraft

__all__ = ["most_tokens", "obstacle"]


def most_tokens(llama: Llama) -> int:
    """Return how many tokens a context holds together with drafts."""
    return min(llama.n_ctx(), len(llama.input_ids))


def obstacle(llama: Llama, draft: DatastoreDraft) -> str | None:
    """Return why an engine has no room for drafts, or None if it has."""
    largest = max(draft.costs)
    if llama.n_batch < largest:
        return f"n_batch is {llama.n_batch}, but drafts need batches of {largest} tokens"
    return None
