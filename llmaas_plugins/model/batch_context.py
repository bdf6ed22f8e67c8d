"""Context of a command's own, in which it evaluates batches."""

from __future__ import annotations

from typing import Any, Self

from llama_cpp import llama_cpp

from llmaas_hooks import LlmaasError
from llmaas_plugins.machine import usable_processors

__all__ = ["BatchContext"]

_MOST_LOGITS_BYTES = 64 << 20
"""Limit of a batch's logits."""


class BatchContext:
    """Context with several sequences, and a batch. Call ``close`` after use, or use ``with``.

    Attributes:
        ctx: Address of the ``llama_context``.
        n_vocab: Size of the model's vocabulary.
    """

    def __init__(  # noqa: PLR0913  sizes of the context
        self,
        model: Any,
        *,
        n_sequences: int,
        n_cells: int,
        most_batch: int,
        n_threads: int,
        out_of_memory: str,
    ) -> None:
        """Create a context of a ``llama_model``.

        Args:
            model: The model.
            n_sequences: Number of sequences.
            n_cells: Number of cells of each sequence.
            most_batch: Most tokens of a batch; it has fewer if their logits take too much memory.
            n_threads: Number of threads; 0 is all processors.
            out_of_memory: End of the error message if there is no memory.

        Raises:
            LlmaasError: There is no memory for the context.
        """
        self._vocab = llama_cpp.llama_model_get_vocab(model)
        self.n_vocab = int(llama_cpp.llama_vocab_n_tokens(self._vocab))
        self._n_batch = max(1, min(most_batch, _MOST_LOGITS_BYTES // (4 * self.n_vocab)))
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max, params.n_ctx = n_sequences, n_sequences * n_cells
        params.n_batch = params.n_ubatch = self._n_batch
        params.n_threads = params.n_threads_batch = n_threads or usable_processors()
        self.ctx = llama_cpp.llama_init_from_model(model, params)
        if self.ctx is None:
            raise LlmaasError(f"no memory for a context of {params.n_ctx} tokens{out_of_memory}")
        self._memory = llama_cpp.llama_get_memory(self.ctx)
        self._batch = llama_cpp.llama_batch_init(self._n_batch, 0, 1)

    def close(self) -> None:
        """Free the context; closing it again does nothing."""
        if self.ctx is not None:
            llama_cpp.llama_batch_free(self._batch)
            llama_cpp.llama_free(self.ctx)
            self.ctx = None

    def __enter__(self) -> Self:
        """Return the open context."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the context."""
        self.close()
