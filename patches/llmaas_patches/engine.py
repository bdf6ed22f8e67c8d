"""Handle on a running engine, which plugins get."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import Llama, llama_cpp

from llmaas_hooks import HookManager, ModelLoad, ParkedSequences, Tokens, common_prefix, forks
from llmaas_patches.background import BackgroundWork
from llmaas_patches.cell_tracker import CellTracker, Due
from llmaas_patches.engine_state import OUTPUTS, Left, Outputs
from llmaas_patches.internals import can_drop_tokens, require_evaluation

__all__ = ["LlamaEngine"]

_log = logging.getLogger("llmaas.patches")


class LlamaEngine:
    """One ``Llama`` and its context (implements ``llmaas_hooks.Engine``).

    Attributes:
        load: How its model was opened; None if it was opened before the activation.
        can_drop_tokens: Whether the last few tokens can be removed.
        needs_all_logits: Whether the running completion reads the logits of its whole prompt.
        n_outputs: Number of last prompt tokens that give logits and states in this request, if they
            are evaluated.
        n_said: Tokens in ``Llama``'s records of the running or last request, without those that a
            draft model only proposed.
        app_drafts: Whether the app set a draft model of its own.
        keeps_cells: Whether a plugin saves and restores the cells of the request in progress.
    """

    def __init__(  # noqa: PLR0913, PLR0917  facts that the host knows
        self,
        llama: Llama,
        hooks: HookManager,
        background: BackgroundWork,
        n_seq_max: int,
        tracker: CellTracker,
        load: ModelLoad | None,
    ) -> None:
        """Attach to ``llama``, whose context has ``n_seq_max`` sequences, by a weak reference."""
        self.load = load
        self._llama = weakref.ref(llama)
        self._hooks = hooks
        self._background = background
        self.ctx: int = int(llama.ctx)
        self.model: int = int(llama.model)
        self.n_seq_max = n_seq_max
        self.can_drop_tokens = can_drop_tokens(llama)
        self.needs_all_logits = False
        self.n_outputs = 1
        self.n_said = 0
        self.app_drafts = self.keeps_cells = False
        self._outputs = Outputs(self.ctx, bool(llama._logits_all))
        setattr(llama._batch, OUTPUTS, self._outputs)
        self._before_restore: Tokens | None = None
        self._n_before_restore = 0
        self._has_restored = self._has_told = False
        self._tracker = tracker
        self._ending = forks.lock()

    @property
    def llama(self) -> Any:
        """The ``Llama`` object.

        Raises:
            ReferenceError: The object no longer exists.
        """
        llama = self._llama()
        if llama is None:
            raise ReferenceError("the Llama object of this engine no longer exists")
        return llama

    @property
    def is_alive(self) -> bool:
        """Whether the ``Llama`` object and its context are still in use."""
        return self._llama() is not None and not self._tracker.is_closed

    def resident_tokens(self) -> Tokens:
        """Return a copy, shape ``(n,)``, of the tokens in sequence 0 at positions 0…n-1.

        Until a restore ends, these are the tokens from before it.
        """
        before = self._before_restore  # once, as another thread may end the restore
        if before is not None:
            return before.copy()
        return np.array(self.llama._input_ids, dtype=np.int32)

    @property
    def n_explained(self) -> int:
        """Number of leading ``resident_tokens`` that the cells are known to hold."""
        return self._tracker.n_explained

    @property
    def is_explained(self) -> bool:
        """Whether the cells are known to hold all tokens of ``Llama``'s records."""
        return bool(self.llama.n_tokens <= self._tracker.n_explained)

    @property
    def resident_app(self) -> str | None:
        """App whose tokens ``resident_tokens`` are; None if it has no name."""
        return self._tracker.app

    @resident_app.setter
    def resident_app(self, app: str | None) -> None:
        self._tracker.app = app

    def doubt_resident(self) -> None:
        """Treat the cells as unknown, so that neither they nor later ones are stored."""
        self._tracker.n_explained = 0

    @property
    def n_spare(self) -> int:
        """Number of cells that plugins added to the context, without those of seats."""
        return self._tracker.n_spare - self._tracker.n_seat_cells

    def has_room_for(self, n_tokens: int) -> bool:
        """Return whether ``Llama``'s token buffer has room for a prompt of this length.

        The buffer has the ``n_ctx`` that the app asked for, which llama.cpp rounds to a multiple
        of 256.
        """
        return n_tokens <= len(self.llama.input_ids)

    @property
    def is_evaluating(self) -> bool:
        """Whether the batch being decoded comes from ``Llama`` itself."""
        return self._tracker.is_evaluating

    @property
    def is_warming_up(self) -> bool:
        """Whether the app warms the engine up (``llama_set_warmup``)."""
        return self._tracker.is_warming_up

    def first_output(self, n_prompt: int) -> int | None:
        """Return the first prompt token that gives logits if evaluated; None for only the last."""
        return None if self.n_outputs <= 1 else max(0, n_prompt - self.n_outputs)

    @contextmanager
    def giving_outputs(self, first: int | None) -> Iterator[None]:
        """Make all tokens from position ``first`` on give logits inside the block."""
        self._outputs.first = first
        try:
            yield
        finally:
            self._outputs.first, self.n_outputs = None, 1

    @property
    def parked(self) -> ParkedSequences:
        """Sequences in which a plugin keeps cells between calls; the host may empty them."""
        return self._tracker.parked

    def lent(self) -> AbstractContextManager[None]:
        """Treat calls on the context inside the block as a plugin's, not the app's."""
        return self._tracker.lent()

    def tell_unexplained(self) -> None:
        """Warn once that requests on cells with unknown tokens are not stored or restored."""
        if not self._has_told:
            _log.warning(
                "%s: the app changed cells without Llama's knowledge (by images, a warm-up, its "
                "own batches or another engine's state); requests that continue from them are not "
                "served by plugins",
                Path(self.llama.model_path).name,
            )
        self._has_told = True

    @property
    def alteration(self) -> str | None:
        """Name of the app's first call that changed how cells are computed; None if there is none.

        The first call is skipped if ``Llama`` was created with an adapter, which it sets itself.
        """
        calls = self._tracker.alterations[1 if self.llama.lora_path else 0 :]
        return calls[0] if calls else None

    def keep_rows(self, wants: Callable[[int], bool]) -> None:
        """Keep the logits of every token of batches whose size ``wants`` accepts."""
        self._outputs.wants = wants

    def require_evaluation(self) -> None:
        """Make ``Llama`` evaluate at least one token before it samples."""
        require_evaluation(self.llama)

    def has_cells(self, n: int) -> bool:
        """Return whether sequence 0 covers at least positions 0 to ``n - 1``."""
        memory = llama_cpp.llama_get_memory(self.ctx)
        first = llama_cpp.llama_memory_seq_pos_min(memory, 0)
        return n == 0 or (first == 0 and llama_cpp.llama_memory_seq_pos_max(memory, 0) >= n - 1)

    @property
    def is_restoring(self) -> bool:
        """Whether a plugin restores cells, or was cut off and they were not dropped yet."""
        return self._before_restore is not None

    def begin_restore(self) -> None:
        """Empty ``Llama``'s records until a plugin has restored cells.

        If Ctrl-C cuts the restore off, the app then uses none of its cells.
        """
        self._n_before_restore = self.llama.n_tokens  # may exceed the length of its buffer
        self._before_restore = self.resident_tokens()
        self.llama.n_tokens = 0

    def keep_unrestored(self) -> None:
        """Put ``Llama``'s records back, because no plugin restored cells."""
        self.llama.n_tokens = self._n_before_restore
        self._before_restore = None

    def set_restored(self, tokens: Tokens, app: str | None) -> None:
        """Set the tokens that ``Llama``'s cells hold now, so that it evaluates only the rest.

        Restored cells come without logits, so ``_requires_eval`` makes ``Llama`` decode at least
        one token before it samples. Their rows of ``scores`` are set to zero, because ``Llama``
        slices all rows, which may hold another prompt's logits or unwritten memory.

        Args:
            tokens: Tokens of sequence 0.
            app: App whose tokens they are.
        """
        if self.llama._logits_all:
            self.llama.scores[common_prefix(self.resident_tokens(), tokens) : len(tokens)] = 0
        self._has_restored = True
        self._tracker.n_explained = len(tokens)
        self.resident_app = app  # before the records, so that no other app reuses the cells
        self._set_resident(tokens)
        self._before_restore = None

    def _set_resident(self, tokens: Tokens) -> None:
        llama = self.llama
        require_evaluation(llama)
        llama.input_ids[: len(tokens)] = tokens
        llama.n_tokens = len(tokens)  # last: Ctrl-C may come in between

    def shorten(self, n_tokens: int) -> None:
        """Record only the first tokens of sequence 0; ``Llama.eval`` then drops the other cells."""
        if n_tokens < self.llama.n_tokens:
            require_evaluation(self.llama)
            self.llama.n_tokens = n_tokens

    def leave(self) -> Left:
        """Return what ``Llama`` holds of a request beside its cells, before others may use it."""
        return Left(self.llama._sampler, self.llama._seed, self.n_said, self.app_drafts)

    def enter(self, left: Left) -> None:
        """Put back what ``leave`` returned."""
        self.llama._sampler, self.llama._seed = left.sampler, left.seed
        self.n_said, self.app_drafts = left.n_said, left.app_drafts

    def can_be_left(self) -> bool:
        """Return whether other requests may use the engine in the middle of one.

        That needs a plugin that keeps the request's cells, and no logits but the last batch's.
        """
        keeps_logits = self._outputs.app_reads_all or self.needs_all_logits
        is_special = keeps_logits or self.is_warming_up or self.app_drafts
        return self.keeps_cells and not is_special and self._hooks.listens("llmaas_turn")

    @property
    def is_sparse(self) -> bool:
        """Whether some cells were computed sparsely, which are not saved."""
        return self._tracker.sparse_from is not None

    def reusable_tokens(self) -> Tokens:
        """Return the leading ``resident_tokens`` whose cells may be saved or reused.

        Sparsely computed cells, for which only the largest values were used, are valid only for
        the answer that they belong to, not for other prompts.
        """
        return self.resident_tokens()[: self._tracker.sparse_from]

    def drop_sparse(self) -> None:
        """Drop the cells of sequence 0 from the first sparsely computed one on."""
        n = self._tracker.sparse_from
        if n is None or n >= self.llama.n_tokens:
            return
        self._set_resident(self.resident_tokens()[:n])  # first: without records, no cell is used
        if not self.llama._ctx.kv_cache_seq_rm(0, n, -1):  # this memory cannot drop a range
            self.drop_resident()

    @contextmanager
    def recording_drops(self) -> Iterator[None]:
        """Shorten ``Llama``'s records to its cells if the block fails.

        ``Llama.generate`` drops cells before it records that. If Ctrl-C came in between, later
        requests would fail. Where the app has changed cells itself, the records stay.
        """
        is_explained = self.is_explained
        try:
            yield
        except BaseException:
            if is_explained and self.is_alive and self.llama.ctx is not None:
                memory = llama_cpp.llama_get_memory(self.ctx)
                n_cells = llama_cpp.llama_memory_seq_pos_max(memory, 0) + 1
                if n_cells == self.n_explained < self.llama.n_tokens:
                    self._set_resident(self.resident_tokens()[:n_cells])
            raise

    def drop_unsaid(self, n_held: int) -> None:
        """Drop the tokens that a plugin's draft model proposed and the app was not given.

        Without drafts, they would not have been evaluated. If the app has evaluated tokens since,
        or has a draft model of its own, everything stays.

        Args:
            n_held: Tokens in ``Llama``'s records when the app was given the last one.
        """
        llama = self.llama
        is_proposed = llama.draft_model is not None and not self.app_drafts
        if is_proposed and self.n_said < n_held == llama.n_tokens:
            require_evaluation(llama)
            llama.n_tokens = self.n_said
            llama._ctx.kv_cache_seq_rm(0, self.n_said, -1)

    def drop_resident(self) -> None:
        """Empty sequence 0, in the cells and in ``Llama``'s records."""
        self._set_resident(np.zeros(0, dtype=np.int32))  # first: without records, no cell is used
        self.llama._ctx.kv_cache_seq_rm(0, -1, -1)
        self._has_restored = False

    def drop_half_restored(self) -> None:
        """Empty all sequences, plugins' included, if a restore began and did not end.

        The caller does this after an error, and again before the next request: Ctrl-C may cut it
        off too. Tokens in ``Llama``'s records stay: a restore begins without any, so their cells
        are not half restored, and the app may have evaluated them since.
        """
        if not self.is_restoring:
            return
        if self.llama.n_tokens == 0:
            self.drop_resident()
        memory = llama_cpp.llama_get_memory(self.ctx)
        with self.lent():
            for sequence in self._tracker.of_plugins(self.n_seq_max):
                llama_cpp.llama_memory_seq_rm(memory, sequence, -1, -1)
        self._tracker.parked.clear()
        self._tracker.is_lent = False  # the restore may have been cut off before it said so
        self._before_restore = None

    def drop_restored(self) -> None:
        """Empty sequence 0 if any of its cells was restored and thus came without logits."""
        if self._has_restored:
            self.drop_resident()

    def begin(self, end: Due) -> None:
        """Register a running request; ``end`` is called when it is over."""
        self._tracker.due.append(end)

    def end_paused(self) -> None:
        """End the requests whose generators wait for the app, on the background thread.

        A request that continues meanwhile waits for this before it uses the cells.
        """

        def job() -> None:
            paused = [end for end in self._tracker.due if end.is_paused]
            if paused:
                self.end(*paused)

        if any(end.is_paused for end in self._tracker.due):
            self._background.defer(self._tracker.handles, job)

    def free_parked_at_end(self) -> None:
        """Free plugins' sequences if the plugins ended while a request was running."""
        if self._tracker.must_free_parked and self.is_alive and self.llama.ctx is not None:
            self.settle()
            self._tracker.free_at_end()

    def end(self, *ends: Due) -> None:
        """Finish these requests, or all open ones, exactly once.

        One thread may end a generator while another begins the next request. The lock makes sure
        that the second thread sees the work that the first one deferred.
        """
        with self._ending:
            for end in ends or tuple(self._tracker.due):
                self._tracker.end(end)

    def defer(self, job: Callable[[], None]) -> None:
        """Run ``job`` on the background thread; calls into this context wait until it is done."""

        def as_plugin() -> None:
            with self.lent():
                job()

        self._background.defer(self._tracker.handles, self._hooks.guarded(as_plugin))

    def settle(self) -> None:
        """Wait until deferred work on this context is done."""
        self._background.settle(self.ctx)
