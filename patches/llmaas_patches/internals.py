"""Private names of llama-cpp-python that other packages need, behind small functions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llama_cpp import Llama, _internals, llama_cpp

__all__ = [
    "can_drop_tokens",
    "decode_all",
    "load_model",
    "real_n_ctx",
    "require_evaluation",
    "sampler_type",
    "server_engine",
]


def can_drop_tokens(llama: Llama) -> bool:
    """Return whether a ``Llama`` can remove its last few tokens, such as rejected drafts."""
    model: Any = llama.model
    has_gaps = llama_cpp.llama_model_n_swa(model) > 0 and not llama.context_params.swa_full
    is_recurrent = llama_cpp.llama_model_is_recurrent(model)
    return not (has_gaps or is_recurrent or llama_cpp.llama_model_is_hybrid(model))


def decode_all(llama: Llama, tokens: Sequence[int], n_past: int) -> None:
    """Evaluate a batch with logits for every token; ``Llama`` records neither."""
    llama._batch.set_batch(batch=tokens, n_past=n_past, logits_all=True)
    llama._ctx.decode(llama._batch)


def load_model(path: Path, params: Any) -> Any:
    """Load a model without a context; the caller closes it.

    Raises:
        ValueError: llama.cpp cannot load the model.
    """
    return _internals.LlamaModel(path_model=str(path), params=params, verbose=False)


def real_n_ctx(ctx: Any) -> int:
    """Return a context's number of cells as the library counts them, also those of plugins."""
    return int(llama_cpp._lib.llama_n_ctx(ctx))


def require_evaluation(llama: Llama) -> None:
    """Make ``Llama`` evaluate a token before it samples, because it holds logits of other cells."""
    llama._requires_eval = True


def sampler_type() -> type:
    """Return the class of sampler chains."""
    return _internals.LlamaSampler


def server_engine() -> Any:
    """Return the ``Llama`` that llama_cpp.server has loaded."""
    from llama_cpp.server import app  # needs the packages of the server

    return app._llama_proxy()
