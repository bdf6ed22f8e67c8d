"""Contexts on the native backend, as plugins see them (implements ``llmaas_hooks.native``)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import ContextCreate, forks
from llmaas_hooks.native import Activation, States
from llmaas_patches.native.cells import Cells
from llmaas_patches.native.claims import EXTENTS, are_extents, c_extents
from llmaas_patches.native.library import Library
from llmaas_patches.native.taps import (
    ACTIVATIONS,
    STATES,
    Density,
    Magnitudes,
    Moments,
    Overlap,
    Rows,
    Tap,
)
from llmaas_patches.native.weights import Weights

__all__ = ["BackendContext"]


def _check_activation(activation: Activation) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation must be one of {', '.join(ACTIVATIONS)}, found {activation!r}"
        )


class BackendContext:
    """One ``llama_context`` and its engine.

    Attributes:
        ctx: Address of the ``llama_context``.
        model: Address of the ``llama_model``.
        load: Record of how the model was opened; None if that was before the activation.
        is_sparse: Value of ``sparse_tokens``, for callers that ask for every token.
        streamed_bytes: Bytes of the model's weights that are read from files.
        n_levels: Number of levels of the claimed parts; 1 if the model is always whole.
    """

    def __init__(
        self, library: Library, engine: Any, ctx: int, create: ContextCreate, table: Any
    ) -> None:
        """Attach to ``engine``, which lives as long as the context, and to a weight ``table``."""
        self.ctx, self.model, self.load = ctx, create.model, create.load
        self.is_sparse = False
        self.streamed_bytes = 0
        self.n_levels = 1
        self._n_whole = 0
        self._table = table
        self._library = library
        self._engine: Any | None = engine
        self._taps: set[Tap] = set()
        self._holds_level = False
        self._observed_level: int | None = None  # outside of an ``unobserved`` block
        self._lock = forks.lock()

    @property
    def has_claims(self) -> bool:
        """Whether the plugins' claims on the model's weights are in effect."""
        return bool(self._table != self._library.ffi.NULL)

    @property
    def level(self) -> int:
        """Index of the extents of claimed parts that are in use."""
        with self._lock:
            return int(self._library.lib.llmaas_engine_level(self._open()))

    @level.setter
    def level(self, level: int) -> None:
        with self._lock:
            if not self._holds_level:
                self._library.lib.llmaas_engine_set_level(self._open(), level)

    def hold_level(self, level: int) -> None:
        """Use this level from now on; later assignments to ``level`` have no effect."""
        with self._lock:
            self._library.lib.llmaas_engine_set_level(self._open(), level)
            self._holds_level = True

    @property
    def narrow_attention(self) -> bool:
        """Whether attention skips cells that no token of a batch can see."""
        with self._lock:
            return bool(self._library.lib.llmaas_engine_is_narrow(self._open()))

    @narrow_attention.setter
    def narrow_attention(self, is_narrow: bool) -> None:
        with self._lock:
            self._library.lib.llmaas_engine_set_narrow(self._open(), is_narrow)

    @property
    def sparse_tokens(self) -> bool:
        """Whether batches of one token are computed sparsely, from the largest values only."""
        with self._lock:
            self._open()
            return self.is_sparse

    @sparse_tokens.setter
    def sparse_tokens(self, is_sparse: bool) -> None:
        with self._lock:
            self._open()
            self.is_sparse = is_sparse
            self._apply_sparse()

    @contextlib.contextmanager
    def unobserved(self, level: int) -> Iterator[None]:
        """Compute batches in the block at a level, and hide them from taps."""
        with self._lock:
            lib, engine = self._library.lib, self._open()
            self._observed_level = lib.llmaas_engine_level(engine)
            lib.llmaas_engine_set_unobserved(engine, True)
            lib.llmaas_engine_set_level(engine, level)
        try:
            yield
        finally:
            self.observe()

    def observe(self) -> None:
        """End an ``unobserved`` block, which may be that of a thread that a forked child lacks."""
        with self._lock:
            former, self._observed_level = self._observed_level, None
            if former is not None and self._engine is not None:  # else it has the end's level
                self._library.lib.llmaas_engine_set_level(self._engine, former)
                self._library.lib.llmaas_engine_set_unobserved(self._engine, False)

    @contextlib.contextmanager
    def whole_batch(self) -> Iterator[None]:
        """Compute every token in the block exactly, even if a batch is split down to one token."""
        self._add_whole(1)
        try:
            yield
        finally:
            self._add_whole(-1)

    def _add_whole(self, n: int) -> None:
        with self._lock:
            self._n_whole += n
            if self._engine is not None:
                self._apply_sparse()

    def _apply_sparse(self) -> None:
        is_sparse = self.is_sparse and self._n_whole == 0
        self._library.lib.llmaas_engine_set_sparse(self._engine, is_sparse)

    def set_part(self, weight: str, extents: Sequence[int | None]) -> None:
        """Replace the extents of a claimed part."""
        if not are_extents(extents):
            raise ValueError(f"expected {EXTENTS}, found {extents!r}")
        values = c_extents(self._library, extents)
        name = weight.encode()
        with self.alive():
            table = self._table
            status = self._library.lib.llmaas_weights_set_part(table, name, values, len(values))
        if status != 0:
            raise KeyError(f"no part of {weight!r} is claimed")

    def density(self, *, row_step: int = 1, layer_step: int = 1) -> Density:
        """Accumulate attention densities."""
        with self.alive():
            return Density(self, self._library, row_step, layer_step)

    def hidden_states(
        self, states: States, *, layer: int | None = None, capacity: int = 4096
    ) -> Rows:
        """Capture hidden states."""
        if states not in STATES:
            raise ValueError(f"states must be one of {', '.join(STATES)}, found {states!r}")
        with self.alive():
            return Rows(self, self._library, states, layer, capacity)

    def magnitudes(self, activation: Activation, n_channels: Mapping[int, int]) -> Magnitudes:
        """Count activations by magnitude."""
        _check_activation(activation)
        with self.alive():
            return Magnitudes(self, self._library, activation, n_channels)

    def moments(self, activation: Activation, n_channels: Mapping[int, int]) -> Moments:
        """Sum activations and their squares."""
        _check_activation(activation)
        with self.alive():
            return Moments(self, self._library, activation, n_channels)

    def overlap(
        self,
        activation: Activation,
        n_channels: Mapping[int, int],
        *,
        thresholds: Mapping[int, NDArray[np.float32]],
        predictors: Mapping[int, int],
    ) -> Overlap:
        """Count values that are large in two layers."""
        _check_activation(activation)
        with self.alive():
            return Overlap(
                self,
                self._library,
                activation,
                n_channels,
                thresholds=thresholds,
                predictors=predictors,
            )

    def cells(self) -> Cells:
        """Return the memory of the KV cells."""
        return Cells(self, self._library)

    def file_weights(self) -> Weights:
        """Return the memory of the model's weights that are read from files."""
        return Weights(self, self._library)

    def untouched_bytes(self) -> int:
        """Return the bytes by which graphs may still grow: reserved, but not yet written."""
        with self.alive() as engine:
            return int(self._library.lib.llmaas_engine_untouched(engine))

    def subscribe(self, tap: Any) -> Tap:
        """Subscribe the ``llmaas_tap`` at address ``tap``."""
        address = self._library.ffi.cast("llmaas_tap *", tap)
        with self.alive():
            return Tap(self, address[0], address.user)

    def stats(self) -> dict[str, int]:
        """Return the engine's counters."""
        stats = self._library.ffi.new("llmaas_engine_stats *")
        with self._lock:
            self._library.lib.llmaas_engine_read_stats(self._open(), stats)
        return {
            "graphs": int(stats.n_graphs),
            "passed": int(stats.n_passed),
            "products": int(stats.n_products),
            "taps": int(stats.n_taps),
            "narrowed": int(stats.n_narrowed),
            "cut": int(stats.n_cut),
        }

    def close(self) -> None:
        """Remove all taps and use every weight in full from the next graph on; idempotent."""
        with self._lock:
            if self._engine is not None:
                for tap in list(self._taps):
                    tap.close()
                self._library.lib.llmaas_engine_set_level(self._engine, -1)
                self._library.lib.llmaas_engine_set_narrow(self._engine, False)
                self._library.lib.llmaas_engine_set_sparse(self._engine, False)
                self._library.lib.llmaas_engine_set_unobserved(self._engine, False)
                self.is_sparse = False
                self._engine = None

    def failure(self) -> str | None:
        """Return why the last graph of this context failed, or None if it did not or is unknown."""
        with self._lock:
            found = self._library.lib.llmaas_engine_failure(self._open())
            ffi = self._library.ffi
            return None if found == ffi.NULL else ffi.string(found).decode(errors="replace")

    @contextlib.contextmanager
    def alive(self) -> Iterator[Any]:
        """Keep the context and its engine alive until the end of the block."""
        with self._lock:
            yield self._open()

    def _open(self) -> Any:
        if self._engine is None:
            raise ReferenceError("the context was freed or the suite was deactivated")
        return self._engine

    def _subscribe(self, tap: Any, owner: Tap) -> None:
        with self._lock:
            pointer = self._library.ffi.new("llmaas_tap *", tap)
            if self._library.lib.llmaas_engine_subscribe(self._open(), pointer) != 0:
                raise RuntimeError("16 taps are subscribed to this context; close one first")
            self._taps.add(owner)  # keeps the memory that graphs write to alive

    def _unsubscribe(self, user: Any, owner: Tap) -> None:
        with self._lock:
            if owner in self._taps:
                self._library.lib.llmaas_engine_unsubscribe(self._engine, user)
                self._taps.discard(owner)
