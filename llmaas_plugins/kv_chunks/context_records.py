"""How each llama.cpp context was made: why it is not served, and what its cells depend on."""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakKeyDictionary

from llama_cpp import llama_cpp

from llmaas_hooks import Engine, ModelLoad, StoreError, forks
from llmaas_plugins.kv_chunks.eligibility import why_unserved_cells
from llmaas_plugins.kv_chunks.parking.sequences import SEQUENCES
from llmaas_plugins.model.digest import Digest, changed_in_place
from llmaas_plugins.model.identity import cell_identity

__all__ = ["ContextRecords", "alteration"]

_log = logging.getLogger("llmaas.kv_chunks")


class ContextRecords:
    """Records of the open contexts that were made since the activation. Thread-safe.

    Attributes:
        digests: Digests of the contexts' models, kept as long as the models.
    """

    def __init__(self) -> None:
        """Start without records."""
        self.digests: WeakKeyDictionary[ModelLoad, Digest] = WeakKeyDictionary()
        self._lock = forks.lock()
        self._reasons: dict[int, str | None] = {}
        self._rotations_off: dict[int, bool] = {}
        self._refused_models: WeakKeyDictionary[ModelLoad, str] = WeakKeyDictionary()
        self._with_others: set[int] = set()
        self._parking: set[int] = set()

    def add(
        self,
        ctx: int,
        load: ModelLoad | None,
        reason: str | None,
        *,
        rotation_off: bool,
        parks: bool,
    ) -> str | None:
        """Record a new context.

        Args:
            ctx: Address of the context.
            load: How its model was opened; None if that was before the activation.
            reason: Why the context is not served, judging by its parameters, or None.
            rotation_off: Whether llama.cpp was told not to rotate the cells' values.
            parks: Whether the context has the sequences of parked contexts.

        Returns:
            Why the context is not served, judging also by its cells, or None.
        """
        found = reason or why_unserved_cells(ctx)
        with self._lock:
            self._reasons[ctx] = found
            self._rotations_off[ctx] = rotation_off
            if found is None and llama_cpp.llama_n_seq_max(ctx) > SEQUENCES:
                self._with_others.add(ctx)
            if found is None and parks:
                self._parking.add(ctx)
            if found is not None and load is not None:
                # the context may now be recreated without a check, at another address
                self._refused_models[load] = found
        return found

    def forget(self, ctx: int) -> None:
        """Forget a context that is about to be freed."""
        with self._lock:
            self._reasons.pop(ctx, None)
            self._rotations_off.pop(ctx, None)
            self._with_others.discard(ctx)
            self._parking.discard(ctx)

    def has_others(self, ctx: int) -> bool:
        """Return whether a context's cells can be those of several requests."""
        return ctx in self._with_others

    def parks(self, ctx: int) -> bool:
        """Return whether a context has the sequences of parked contexts."""
        return ctx in self._parking

    def why_unserved(self, engine: Engine) -> str | None:
        """Return why an engine cannot be served, judging by how its context was made, or None."""
        with self._lock:
            reason = self._reasons.get(engine.ctx)
            if reason is not None:
                return reason
            if engine.ctx not in self._reasons or engine.n_seq_max < SEQUENCES:
                refused = None if engine.load is None else self._refused_models.get(engine.load)
                return refused or "its context was made before the activation"
            return None

    def identity(self, engine: Engine, wait_s: float) -> dict[str, Any] | None:
        """Return everything that determines the bytes of an engine's cells; None if not known yet.

        Args:
            engine: Engine that is served.
            wait_s: Most seconds to wait until the model's file has been read.

        Raises:
            StoreError: It can never be known.
        """
        if engine.load is None:
            raise StoreError("its model was loaded before the activation, or trained since")
        is_off = self._rotations_off[engine.ctx]
        found = cell_identity(engine.llama, engine.load, rotation_off=is_off, wait_s=wait_s)
        if found is None:
            _log.info("contexts are not stored before the whole model file has been read once")
        return found


def alteration(engine: Engine) -> str | None:
    """Return why an engine's cells no longer match its model as it was loaded, or None."""
    if engine.alteration is not None:
        return f"the app called {engine.alteration}"
    if engine.load is not None and changed_in_place(engine.load.files):
        return "its model file was written to while in use"
    return None
