"""Decide which contexts the plugin serves; all others stay unchanged."""

from __future__ import annotations

from llama_cpp import llama_cpp

from llmaas_hooks import ContextCreate, ModelLoad
from llmaas_plugins.kv_chunks.parking.sequences import PARKED_SEQUENCES, SCRATCH_SEQUENCE, SEQUENCES
from llmaas_plugins.kv_chunks.store.chunk_ids import CHUNK_TOKENS
from llmaas_plugins.model.cell_sizes import CELL_STEP, n_ctx_of
from llmaas_plugins.model.identity import may_have_long_factors, metadata, rope_switch

__all__ = ["request_cells", "spare_cells", "why_unserved", "why_unserved_cells"]

_EMPTY_BLOB_BYTES = (16, 24)
_NOT_CAUSAL = "attention is not causal: cells depend on what follows"


def why_unserved(create: ContextCreate) -> str | None:
    """Return why a context that is about to be made cannot be served, or None."""
    model, params = create.model, create.params
    n_window = _window(model)
    reasons = {
        "recurrent model: its state cannot drop ranges": llama_cpp.llama_model_is_recurrent(model),
        "hybrid model: its state cannot drop ranges": llama_cpp.llama_model_is_hybrid(model),
        "diffusion model: it has no causal cells": llama_cpp.llama_model_is_diffusion(model),
        "encoder model: its cells do not extend": llama_cpp.llama_model_has_encoder(model),
        f"sliding window of {n_window} tokens without swa_full: old cells are gone": (
            n_window > 0 and not params.swa_full
        ),
        f"sliding window of {n_window} tokens, less than a chunk": 0 < n_window < CHUNK_TOKENS,
        "embedding context": bool(params.embeddings),
        _NOT_CAUSAL: params.attention_type == llama_cpp.LLAMA_ATTENTION_TYPE_NON_CAUSAL,
        f"the app itself uses {params.n_seq_max} sequences": params.n_seq_max > 1,
        f"batches of {_batch_tokens(create)} tokens: llama.cpp aborts with fewer than it has "
        f"sequences, {SEQUENCES} here": _batch_tokens(create) < SEQUENCES,
        "2-D positions (M-RoPE)": _has_2d_positions(model),
        "layers are offloaded to a GPU: this is not tested": _is_offloaded(create.load),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def why_unserved_cells(ctx: int) -> str | None:
    """Return why a new context cannot be served after all, judging by its cells, or None.

    The blob of an empty context has 16 bytes with one cache of keys and values, and 24 with two.
    The model does not reveal whether its architecture keeps more, an index for instance, or none.
    """
    if llama_cpp.llama_get_memory(ctx) is None:
        return "encoder or diffusion model: it keeps no cells"
    if not _is_causal(ctx):
        return _NOT_CAUSAL
    n_bytes = llama_cpp.llama_state_seq_get_size(ctx, SCRATCH_SEQUENCE)
    has_window = _window(llama_cpp.llama_get_model(ctx)) > 0
    if n_bytes not in _EMPTY_BLOB_BYTES[: 1 + has_window]:
        return "its state has more than caches of keys and values"
    return None


def _is_causal(ctx: int) -> bool:
    """Return whether a context's attention is causal.

    Before llama-cpp-python 0.3.36 only the model's metadata can tell. This suffices, because in
    0.3.35 models with a non-causal architecture keep no cells.
    """
    if hasattr(llama_cpp, "llama_get_causal_attn"):
        return bool(llama_cpp.llama_get_causal_attn(ctx))
    model = llama_cpp.llama_get_model(ctx)
    arch = metadata(model, "general.architecture")
    return metadata(model, f"{arch}.attention.causal") != "false"


def spare_cells(create: ContextCreate, wanted: int) -> int:
    """Return how many of ``wanted`` spare cells for parked contexts a served context may get.

    The result is 0 with a sliding window, because llama.cpp reuses cells that no token of their
    sequence will see, and cuts the sequence at the gap. The result is 0 if a larger context changes
    the RoPE factors, or if a batch has fewer tokens than there would be sequences.
    """
    if _window(create.model) > 0 or _changes_rope(create, wanted):
        return 0
    if _batch_tokens(create) < PARKED_SEQUENCES.stop:
        return 0
    return wanted // CELL_STEP * CELL_STEP


def request_cells(create: ContextCreate, n_parked: int, codec: str) -> bool:
    """Ask for the scratch sequence, and for cells of parked contexts and of requests aside.

    Returns:
        Whether the context has the sequences of parked contexts. One without cells for these has
        them if its requests may be interrupted (``UnusedCells``).
    """
    if create.why_no_seats is None and create.wants_seats:
        create.why_no_seats = _why_no_seats(create, n_parked, codec)
    create.n_seats = 0 if create.why_no_seats else create.wants_seats
    n_aside = create.n_seats * _own_cells(create)
    n_spare = spare_cells(create, n_parked)
    if n_spare or n_aside:
        create.params.n_ctx = n_ctx_of(create) + n_spare + n_aside
    parks = n_spare > 0 or _keeps_interrupted(create)
    create.params.n_seq_max = (PARKED_SEQUENCES.stop if parks else SEQUENCES) + create.n_seats
    create.params.kv_unified = True
    return parks


def _keeps_interrupted(create: ContextCreate) -> bool:
    """Return whether interrupted requests stay in the cells that others of a context do not need.

    Where requests lie aside, each has cells of its own.
    """
    has_window = _window(create.model) > 0
    is_wide = _batch_tokens(create) >= PARKED_SEQUENCES.stop
    return create.takes_turns and is_wide and not (create.n_seats or has_window)


def _why_no_seats(create: ContextCreate, n_parked: int, codec: str) -> str | None:
    """Return why no requests may lie aside in a served context with parked cells, or None."""
    n_sequences = PARKED_SEQUENCES.stop + create.wants_seats
    reasons = {
        'codec = "lossless" of kv_chunks promises the logits of a call alone, and those of batches '
        "differ in the last bits": codec == "lossless",
        "llama.cpp reuses cells of models with a sliding window": _window(create.model) > 0,
        f"batches of {_batch_tokens(create)} tokens are too small, {n_sequences} are needed": (
            _batch_tokens(create) < n_sequences
        ),
        "with as many cells, the model would use its RoPE factors for long contexts": _changes_rope(
            create, n_parked + create.wants_seats * _own_cells(create)
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _own_cells(create: ContextCreate) -> int:
    """Return the number of cells that the app asked for, which llama.cpp rounds up."""
    return -(-n_ctx_of(create) // CELL_STEP) * CELL_STEP


def _batch_tokens(create: ContextCreate) -> int:
    """Return the most tokens of a batch, in which llama.cpp reserves an output per sequence."""
    return min(n_ctx_of(create), int(create.params.n_batch))


def _changes_rope(create: ContextCreate, n_spare: int) -> bool:
    """Return whether ``n_spare`` more cells would switch the model to its long RoPE factors."""
    n_ctx = n_ctx_of(create)
    is_crossed = n_ctx <= rope_switch(create.model, create.load) < n_ctx + n_spare + CELL_STEP
    return is_crossed and may_have_long_factors(create.load)


def _window(model: int) -> int:
    """Return the tokens that a model's sliding-window layers see; 0 if it has no such layers."""
    return int(llama_cpp.llama_model_n_swa(model))


def _is_offloaded(load: ModelLoad | None) -> bool:
    """Return whether layers may be on a GPU; an unknown load counts as offloaded."""
    if not llama_cpp.llama_supports_gpu_offload():
        return False
    return load is None or load.params.n_gpu_layers != 0


def _has_2d_positions(model: int) -> bool:
    """Return whether a model uses M-RoPE or a variant, whose type numbers are the highest."""
    return int(llama_cpp.llama_model_rope_type(model)) >= llama_cpp.LLAMA_ROPE_TYPE_MROPE
