"""The handle on a running engine that plugins get."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import Llama, llama_cpp

from llmaas_hooks import HookManager, ModelLoad, Tokens, common_prefix, forks
from llmaas_patches.lanes import Lanes
from llmaas_patches.ledger import Ledger

__all__ = ["OUTPUTS", "LlamaEngine", "Outputs"]

OUTPUTS = "_llmaas_outputs"
"""Attribute of a ``LlamaBatch``: the ``Outputs`` of its engine."""

_log = logging.getLogger("llmaas.patches")


@dataclass(slots=True)
class Outputs:
    """Which tokens of an engine's batches give logits that the app did not ask for.

    Attributes:
        ctx: Address of the context.
        app_reads_all: The app made its ``Llama`` with ``logits_all``.
        first: Position from which on all tokens give logits; None outside of prompts.
    """

    ctx: int
    app_reads_all: bool
    first: int | None = None


class LlamaEngine:
    """One ``Llama`` and its context (implements ``llmaas_hooks.Engine``).

    Attributes:
        load: How its model was opened; None if that was before the activation.
        needs_all_logits: The running completion reads the logits of its whole prompt.
        n_outputs: How many of the running request's last prompt tokens give logits and states.
        n_said: Tokens in the books of the running or last request, less those that were only
            proposed by a draft model.
    """

    def __init__(  # noqa: PLR0913, PLR0917  what the host knows of it
        self,
        llama: Llama,
        hooks: HookManager,
        lanes: Lanes,
        n_seq_max: int,
        ledger: Ledger,
        load: ModelLoad | None,
    ) -> None:
        """Attach to ``llama``, whose context has ``n_seq_max`` sequences, not keeping it alive."""
        self.load = load
        self._llama = weakref.ref(llama)
        self._hooks = hooks
        self._lanes = lanes
        self.ctx: int = int(llama.ctx)
        self.model: int = int(llama.model)
        self.n_seq_max = n_seq_max
        self.needs_all_logits = False
        self.n_outputs = 1
        self.n_said = 0
        self._outputs = Outputs(self.ctx, bool(llama._logits_all))
        setattr(llama._batch, OUTPUTS, self._outputs)
        self._has_restored = False
        self._has_told = False
        self._ledger = ledger
        self._ending = forks.lock()

    @property
    def llama(self) -> Any:
        """The ``Llama`` object.

        Raises:
            ReferenceError: It is gone.
        """
        llama = self._llama()
        if llama is None:
            raise ReferenceError("the Llama object of this engine is gone")
        return llama

    @property
    def is_alive(self) -> bool:
        """Whether the ``Llama`` object and its context are still in use."""
        return self._llama() is not None and not self._ledger.is_closed

    def resident_tokens(self) -> Tokens:
        """Tokens whose KV cells sequence 0 holds, at positions 0…n-1; a copy of shape ``(n,)``."""
        return np.array(self.llama._input_ids, dtype=np.int32)

    @property
    def n_explained(self) -> int:
        """Leading tokens of ``resident_tokens`` that are known to be what the cells hold."""
        return self._ledger.n_explained

    @property
    def resident_app(self) -> str | None:
        """App whose tokens ``resident_tokens`` are; None if it has no name."""
        return self._ledger.app

    @resident_app.setter
    def resident_app(self, app: str | None) -> None:
        self._ledger.app = app

    def doubt_resident(self) -> None:
        """Have nothing of ``resident_tokens`` stored, nor what follows them."""
        self._ledger.n_explained = 0

    @property
    def n_spare(self) -> int:
        """Cells that plugins added to the context."""
        return self._ledger.n_spare

    @property
    def is_evaluating(self) -> bool:
        """Whether ``Llama`` itself evaluates the batch that is decoded."""
        return self._ledger.is_evaluating

    def make_room_for_outputs(self, n_prompt: int) -> int | None:
        """Give up cells of tokens that are to give logits, so that ``Llama`` evaluates them.

        Returns:
            How many tokens of the prompt come before those; None if the last is the only one.
        """
        if self.n_outputs <= 1:
            return None
        first, llama = max(0, n_prompt - self.n_outputs), self.llama
        if llama.n_tokens > first:
            llama.n_tokens, llama._requires_eval = first, True
        return first

    @contextmanager
    def giving_outputs(self, first: int | None) -> Iterator[None]:
        """Have all tokens from position ``first`` on give logits, inside the block alone."""
        self._outputs.first = first
        try:
            yield
        finally:
            self._outputs.first, self.n_outputs = None, 1

    @property
    def parked(self) -> set[int]:
        """Sequences in which a plugin keeps cells between calls; the host may empty them."""
        return self._ledger.parked

    def lent(self) -> AbstractContextManager[None]:
        """The calls on the context inside the block are a plugin's."""
        return self._ledger.lent()

    def tell_unexplained(self) -> None:
        """Say once that requests are left alone that go on with cells nobody explains."""
        if not self._has_told:
            _log.warning(
                "%s: its cells were changed behind Llama's back (by images, or batches of the "
                "app's own); requests that go on with them are left alone",
                Path(self.llama.model_path).name,
            )
        self._has_told = True

    @property
    def alteration(self) -> str | None:
        """The call by which the app changed how cells are computed; None: it did not.

        ``Llama`` itself sets the adapter that it was made with.
        """
        calls = self._ledger.alterations[1 if self.llama.lora_path else 0 :]
        return calls[0] if calls else None

    def has_cells(self, n: int) -> bool:
        """Whether sequence 0 reaches from position 0 to ``n - 1`` at least."""
        memory = llama_cpp.llama_get_memory(self.ctx)
        first = llama_cpp.llama_memory_seq_pos_min(memory, 0)
        return n == 0 or (first == 0 and llama_cpp.llama_memory_seq_pos_max(memory, 0) >= n - 1)

    def set_restored(self, tokens: Tokens) -> None:
        """Tell ``Llama`` which tokens its cells hold now, so that it evaluates only the rest.

        ``_requires_eval`` makes it decode at least one token before it samples: restored cells
        come without logits. Their rows of ``scores`` are zeros, not another prompt's logits or
        memory that was never written: ``Llama`` computes with all rows, if only to slice them.
        """
        if self.llama._logits_all:
            self.llama.scores[common_prefix(self.resident_tokens(), tokens) : len(tokens)] = 0
        self._has_restored = True
        self._ledger.n_explained = len(tokens)
        self._set_resident(tokens)

    def _set_resident(self, tokens: Tokens) -> None:
        llama = self.llama
        llama.n_tokens = len(tokens)
        llama.input_ids[: len(tokens)] = tokens
        llama._requires_eval = True

    def reusable_tokens(self) -> Tokens:
        """Leading tokens of ``resident_tokens`` whose cells may serve another prompt, or be saved.

        Cells that the largest values made are good for the answer that they belong to only.
        """
        return self.resident_tokens()[: self._ledger.sparse_from]

    def drop_sparse(self) -> None:
        """Empty sequence 0 from the first sparse cell on."""
        n = self._ledger.sparse_from
        if n is None or n >= self.llama.n_tokens:
            return
        if self.llama._ctx.kv_cache_seq_rm(0, n, -1):
            self._set_resident(self.resident_tokens()[:n])
        else:  # a memory that cannot be cut
            self.drop_resident()

    def drop_resident(self) -> None:
        """Empty sequence 0, in the cells and in ``Llama``'s books."""
        self.llama._ctx.kv_cache_seq_rm(0, -1, -1)
        self._set_resident(np.zeros(0, dtype=np.int32))
        self._has_restored = False

    def drop_restored(self) -> None:
        """Empty sequence 0 if any of its cells ever came without logits."""
        if self._has_restored:
            self.drop_resident()

    def begin(self, end: Callable[[], None]) -> None:
        """A request is under way; ``end`` is what is due when it is over."""
        self._ledger.due.append(end)

    def end(self, *ends: Callable[[], None]) -> None:
        """Do what is due for these requests, or all that are open, once.

        A generator may be ended by another thread than the one that makes the next request. What
        the first defers, the second must find: hence the lock.
        """
        with self._ending:
            due = self._ledger.due
            for end in ends or tuple(due):
                try:
                    due.remove(end)
                except ValueError:  # it is over, perhaps as its context went
                    continue
                end()

    def defer(self, job: Callable[[], None]) -> None:
        """Run ``job`` on the lane's thread; calls into this context wait until it is done."""

        def as_plugin() -> None:
            with self.lent():
                job()

        self._lanes.defer(self._ledger.handles, self._hooks.guarded(as_plugin))

    def settle(self) -> None:
        """Wait until deferred work on this context is done."""
        self._lanes.settle(self.ctx)
