"""A context inside the engine, as plugins see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks.native.cells import CellMemory
from llmaas_hooks.native.taps import (
    Activation,
    AttentionDensity,
    HiddenStates,
    Magnitudes,
    Moments,
    Overlap,
    States,
    Subscription,
)
from llmaas_hooks.native.weights import FileWeights
from llmaas_hooks.types import ModelLoad

__all__ = ["NativeContext"]


class NativeContext(Protocol):
    """A context whose graphs pass through the hook point in the engine.

    Every call that needs the engine raises ``ReferenceError`` once the context is freed or the
    suite is deactivated.
    """

    @property
    def ctx(self) -> int:
        """Address of the ``llama_context``."""

    @property
    def model(self) -> int:
        """Address of the ``llama_model``."""

    @property
    def load(self) -> ModelLoad | None:
        """Record of how the model was opened; None if that was before the activation."""

    @property
    def has_claims(self) -> bool:
        """Whether the plugins' claims on its model are in force; False if there are none.

        With ``on_error = "log"`` a single claim that cannot be met voids all claims on a model or
        context.
        """

    @property
    def level(self) -> int:
        """Level in use: an index into the extents of every claimed part; 0 at first.

        Below 0, every part is whole. A new value takes effect with the next batch, or with the next
        ``n_ubatch`` tokens of a batch that another thread evaluates. The change itself costs
        nothing.
        """

    @level.setter
    def level(self, level: int) -> None: ...

    @property
    def n_levels(self) -> int:
        """Number of levels of the claimed parts; 1 if the model is always whole."""

    def hold_level(self, level: int) -> None:
        """Fix the level from now on, whatever ``level`` is set to later.

        A plugin uses this for a context of its own: levels that apps request must not matter there.
        """

    @property
    def narrow_attention(self) -> bool:
        """Whether attention skips cells that no token of a batch can see; False at first.

        Setting this may change the last bits of logits. A new value takes effect with the next
        batch, and costs nothing where all cells are visible.
        """

    @narrow_attention.setter
    def narrow_attention(self, is_narrow: bool) -> None: ...

    @property
    def sparse_tokens(self) -> bool:
        """Whether batches of one token multiply only the largest values; False at first.

        The setting concerns weights with operands (``FileWeights.add_operand``) and takes effect
        with the next batch. A larger batch is computed exactly, even where llama.cpp splits it and
        one token is left. Cells that ``Llama`` evaluates one by one meanwhile serve only the
        request that made them: they are neither saved nor reused for a later prompt.
        """

    @sparse_tokens.setter
    def sparse_tokens(self, is_sparse: bool) -> None: ...

    def set_part(self, weight: str, extents: Sequence[int | None]) -> None:
        """Replace the extents of a claimed part in all contexts of the model.

        The call waits for the batch being computed; the next one uses the new extents. Biases stay.

        Args:
            weight: Name of the weight.
            extents: Numbers of rows or columns in use by level, in the form that the claim had.

        Raises:
            ValueError: ``extents`` is empty, has more than 64 entries, or has one below 0.
            KeyError: No part of this weight is claimed.
        """

    def density(self, *, row_step: int = 1, layer_step: int = 1) -> AttentionDensity:
        """Subscribe to attention densities.

        Args:
            row_step: Use one of ``row_step`` queries, a different one in each layer and group of
                heads. Batches with fewer tokens than that use one of ``4 * row_step``, which counts
                four times.
            layer_step: Use every ``layer_step``-th layer. Steps of 1 and 1 are exact.
        """

    def hidden_states(
        self, states: States, *, layer: int | None = None, capacity: int = 4096
    ) -> HiddenStates:
        """Subscribe to hidden states.

        Args:
            states: Which hidden states to capture.
            layer: Layer for ``"ffn_input"``; None is the last layer.
            capacity: Number of rows that are kept until they are taken.
        """

    def magnitudes(self, activation: Activation, n_channels: Mapping[int, int]) -> Magnitudes:
        """Subscribe to counts of an activation's magnitudes.

        Args:
            activation: Which activation to count.
            n_channels: Number of values in a row of the activation, by layer; other layers are not
                counted.
        """

    def moments(self, activation: Activation, n_channels: Mapping[int, int]) -> Moments:
        """Subscribe to sums of an activation and its squares; arguments as for ``magnitudes``."""

    def overlap(
        self,
        activation: Activation,
        n_channels: Mapping[int, int],
        *,
        thresholds: Mapping[int, NDArray[np.float32]],
        predictors: Mapping[int, int],
    ) -> Overlap:
        """Subscribe to counts of values that are large in two layers.

        Args:
            activation: Which activation to count.
            n_channels: As for ``magnitudes``.
            thresholds: Magnitudes from which values are large, by layer; equally many, at most 32.
            predictors: Earlier layer of the same width with which a layer is compared. Layers
                without one are not compared.
        """

    def cells(self) -> CellMemory:
        """Return the memory of this context's KV cells."""

    def file_weights(self) -> FileWeights:
        """Return the memory of the model's weights in files; all contexts of a model share it."""

    def untouched_bytes(self) -> int:
        """Return the bytes by which graphs may still grow: reserved, but not yet written."""

    def subscribe(self, tap: Any) -> Subscription:
        """Subscribe a plugin's own tap: the address of an ``llmaas_tap`` (llmaas/tap.h)."""

    def stats(self) -> dict[str, int]:
        """Return the engine's counters.

        - ``graphs``: computed graphs.
        - ``passed``: the part of ``graphs`` that was passed on unchanged.
        - ``products``: products that were replaced.
        - ``taps``: nodes that taps were given.
        - ``narrowed``: attention nodes that were narrowed.
        - ``cut``: nodes that were cut to the rows in use of the weights before them.
        """
