"""Taps of a context, as plugins see them (implements ``llmaas_hooks.native``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from llama_cpp import llama_cpp
from numpy.typing import NDArray

from llmaas_hooks.native import Activation, States
from llmaas_patches.native.library import Library

if TYPE_CHECKING:
    from llmaas_patches.native.backend_context import BackendContext

__all__ = ["ACTIVATIONS", "STATES", "Density", "Magnitudes", "Moments", "Overlap", "Rows", "Tap"]

STATES = {"ffn_input": 1, "final_norm": 2}
"""``llmaas_tap_kind`` of the hidden states that can be captured."""
ACTIVATIONS = {"attn_input": 3, "attn_result": 4, "ffn_input": 1, "ffn_middle": 5}
"""``llmaas_tap_kind`` of the activations whose magnitudes and moments can be counted."""
_BUCKETS = 16320
_ROWS = 16


class Tap:
    """A subscription. The consumer's C object is freed once no graph can reach it."""

    def __init__(self, context: BackendContext, tap: Any, user: Any) -> None:
        """Subscribe ``tap``, whose consumer is ``user``."""
        self._context = context
        self._user = user
        context._subscribe(tap, self)

    def close(self) -> None:
        """End the subscription."""
        self._context._unsubscribe(self._user, self)

    def __enter__(self) -> Self:
        """Return the subscription itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the subscription."""
        self.close()


class Density(Tap):
    """``llmaas_density`` of a context."""

    def __init__(
        self, context: BackendContext, library: Library, row_step: int, layer_step: int
    ) -> None:
        """Subscribe, for positions up to the context's length."""
        if min(row_step, layer_step) < 1:
            raise ValueError(f"steps must be 1 or more, found {row_step} and {layer_step}")
        self._n_pos = int(llama_cpp.llama_n_ctx(context.ctx))
        self._n_layer = int(llama_cpp.llama_model_n_layer(context.model))
        ffi, lib = self._library = library
        density = lib.llmaas_density_new(self._n_pos, self._n_layer, row_step, layer_step)
        self._density = ffi.gc(_made(ffi, density), lib.llmaas_density_free)
        super().__init__(context, lib.llmaas_density_tap(density), density)

    def read(self, n: int) -> tuple[NDArray[np.float64], NDArray[np.uint64]]:
        """Return summed attention and score counts for positions 0…n-1."""
        return self._copy_out(self._library.lib.llmaas_density_read, n)

    def take(self, n: int) -> tuple[NDArray[np.float64], NDArray[np.uint64]]:
        """Return summed attention and score counts for positions 0…n-1, and reset them to 0."""
        return self._copy_out(self._library.lib.llmaas_density_take, n)

    def _copy_out(self, function: Any, n: int) -> tuple[NDArray[np.float64], NDArray[np.uint64]]:
        self._check(n)
        sums, counts = np.zeros(n), np.zeros(n, dtype=np.uint64)
        cast = self._library.ffi.cast
        function(
            self._density,
            n,
            cast("double *", sums.ctypes.data),
            cast("uint64_t *", counts.ctypes.data),
        )
        return sums, counts

    def cells(self, n: int) -> NDArray[np.int32]:
        """Return the cells of positions 0…n-1 by layer, shape ``(n_layers, n)``."""
        self._check(n)
        cells = np.empty((self._n_layer, n), dtype=np.int32)
        pointer = self._library.ffi.cast("int32_t *", cells.ctypes.data)
        self._library.lib.llmaas_density_cells(self._density, n, pointer)
        return cells

    def place(self, kept: int, n: int, cells: NDArray[np.int32] | None = None) -> None:
        """Announce that positions kept…n-1 are restored next, or already lie in ``cells``."""
        self._check(n)
        if not 0 <= kept <= n:
            raise ValueError(f"cannot keep {kept} of {n} positions")
        pointer = self._library.ffi.NULL
        if cells is not None:
            cells = np.ascontiguousarray(cells, dtype=np.int32)
            if cells.shape != (self._n_layer, n):
                raise ValueError(f"cells have shape {cells.shape}, expected {(self._n_layer, n)}")
            pointer = self._library.ffi.cast("int32_t *", cells.ctypes.data)
        self._library.lib.llmaas_density_place(self._density, kept, n, pointer)

    def _check(self, n: int) -> None:
        if not 0 <= n <= self._n_pos:
            raise ValueError(f"asked for {n} positions, but the context has {self._n_pos}")

    def reset(self) -> None:
        """Reset all sums and counts to 0."""
        self._library.lib.llmaas_density_reset(self._density)


class Rows(Tap):
    """``llmaas_hidden_states`` of a context."""

    def __init__(
        self,
        context: BackendContext,
        library: Library,
        states: States,
        layer: int | None,
        capacity: int,
    ) -> None:
        """Subscribe, with a buffer for ``capacity`` rows."""
        n_layer = int(llama_cpp.llama_model_n_layer(context.model))
        layer = n_layer - 1 if layer is None else layer
        if not 0 <= layer < n_layer:
            raise ValueError(f"asked for layer {layer}, but the model has {n_layer} layers")
        if capacity < 1:
            raise ValueError(f"capacity must be 1 or more, found {capacity}")
        self._n_embd = int(llama_cpp.llama_model_n_embd(context.model))
        ffi, lib = self._library = library
        made = lib.llmaas_hidden_states_new(STATES[states], layer, self._n_embd, capacity)
        self._states = ffi.gc(_made(ffi, made), lib.llmaas_hidden_states_free)
        self.n_lost = 0
        super().__init__(context, lib.llmaas_hidden_states_tap(made), made)

    def take(self) -> NDArray[np.float32]:
        """Remove and return all captured rows, which are usually few."""
        parts = [self._take()]
        while len(parts[-1]) == _ROWS:
            parts.append(self._take())
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _take(self) -> NDArray[np.float32]:
        rows = np.empty((_ROWS, self._n_embd), dtype=np.float32)
        n_taken, n_lost = self._library.ffi.new("uint32_t *"), self._library.ffi.new("uint64_t *")
        pointer = self._library.ffi.cast("float *", rows.ctypes.data)
        self._library.lib.llmaas_hidden_states_take(self._states, _ROWS, pointer, n_taken, n_lost)
        self.n_lost += int(n_lost[0])
        return rows[: n_taken[0]]


class Channels(Tap):
    """A tap that accumulates an activation's values in some layers."""

    _name: ClassVar[str]
    """Name of the C object, without its prefix ``llmaas_``."""

    def __init__(
        self,
        context: BackendContext,
        library: Library,
        activation: Activation,
        n_channels: Mapping[int, int],
        *more: Any,
    ) -> None:
        """Subscribe to these layers; ``more`` are further arguments of the C object."""
        n_layer = int(llama_cpp.llama_model_n_layer(context.model))
        if not n_channels or not n_channels.keys() <= set(range(n_layer)):
            raise ValueError(f"asked for layers {list(n_channels)}, but the model has {n_layer}")
        if min(n_channels.values()) < 1:
            raise ValueError(f"layers need 1 or more channels, found {min(n_channels.values())}")
        self._n_channels = dict(n_channels)
        ffi, lib = self._library = library
        counted = ffi.new("uint32_t[]", [n_channels.get(layer, 0) for layer in range(n_layer)])
        made = getattr(lib, f"llmaas_{self._name}_new")(
            ACTIVATIONS[activation], n_layer, counted, *more
        )
        self._counted = ffi.gc(_made(ffi, made), getattr(lib, f"llmaas_{self._name}_free"))
        super().__init__(context, getattr(lib, f"llmaas_{self._name}_tap")(made), made)

    def _check(self, layer: int) -> int:
        """Return a layer's number of channels, after checking that the layer is counted."""
        if layer not in self._n_channels:
            raise ValueError(f"layer {layer} is not counted, only {list(self._n_channels)}")
        return self._n_channels[layer]


class Magnitudes(Channels):
    """``llmaas_magnitudes`` of a context."""

    _name = "magnitudes"

    def read(self, layer: int) -> tuple[NDArray[np.uint64], NDArray[np.float64]]:
        """Return a layer's value counts by magnitude bucket, and summed magnitudes by channel."""
        counts, sums = np.empty(_BUCKETS, dtype=np.uint64), np.empty(self._check(layer))
        cast = self._library.ffi.cast
        self._library.lib.llmaas_magnitudes_read(
            self._counted,
            layer,
            cast("uint64_t *", counts.ctypes.data),
            cast("double *", sums.ctypes.data),
        )
        return counts, sums


class Moments(Channels):
    """``llmaas_moments`` of a context."""

    _name = "moments"

    def read(self, layer: int) -> tuple[int, NDArray[np.float64], NDArray[np.float64]]:
        """Return a layer's number of rows, and by channel the sums of values and of squares."""
        ffi, lib = self._library
        n_rows, (sums, squares) = ffi.new("uint64_t *"), np.empty((2, self._check(layer)))
        lib.llmaas_moments_read(
            self._counted,
            layer,
            n_rows,
            ffi.cast("double *", sums.ctypes.data),
            ffi.cast("double *", squares.ctypes.data),
        )
        return int(n_rows[0]), sums, squares


class Overlap(Channels):
    """``llmaas_overlap`` of a context."""

    _name = "overlap"

    def __init__(  # noqa: PLR0913 -- where to subscribe, and what is compared with what
        self,
        context: BackendContext,
        library: Library,
        activation: Activation,
        n_channels: Mapping[int, int],
        *,
        thresholds: Mapping[int, NDArray[np.float32]],
        predictors: Mapping[int, int],
    ) -> None:
        """Subscribe to these layers."""
        n_layer = int(llama_cpp.llama_model_n_layer(context.model))
        widths = {len(each) for each in thresholds.values()}
        if thresholds.keys() != n_channels.keys() or widths - set(range(1, 33)) or len(widths) != 1:
            raise ValueError("expected 1 to 32 thresholds, equally many for each layer counted")
        for layer, other in predictors.items():
            if other >= layer or n_channels.get(layer) != n_channels.get(other, 0):
                raise ValueError(f"layer {layer} cannot be compared with layer {other}")
        self._n_thresholds = widths.pop()
        rows = np.zeros((n_layer, self._n_thresholds), np.float32)
        for layer in thresholds.keys() & set(range(n_layer)):
            rows[layer] = thresholds[layer]
        ffi = library.ffi
        earlier = ffi.new("int32_t[]", [predictors.get(layer, -1) for layer in range(n_layer)])
        values = ffi.cast("float *", rows.ctypes.data)
        super().__init__(
            context, library, activation, n_channels, earlier, self._n_thresholds, values
        )

    def read(self, layer: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Return how many of a layer's values reached each threshold, here and in both layers."""
        self._check(layer)
        used, both = np.empty((2, self._n_thresholds), dtype=np.uint64)
        cast = self._library.ffi.cast
        self._library.lib.llmaas_overlap_read(
            self._counted,
            layer,
            cast("uint64_t *", used.ctypes.data),
            cast("uint64_t *", both.ctypes.data),
        )
        return used, both


def _made(ffi: Any, made: Any) -> Any:
    if made == ffi.NULL:
        raise MemoryError("not enough memory for a tap")
    return made
