"""Taps on the graphs that the engine computes."""

from __future__ import annotations

from typing import Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Activation",
    "AttentionDensity",
    "HiddenStates",
    "Magnitudes",
    "Moments",
    "Overlap",
    "States",
    "Subscription",
]

States = Literal["ffn_input", "final_norm"]
"""Hidden states that can be captured.

- ``"ffn_input"``: input of a layer's feed-forward block.
- ``"final_norm"``: input of the output matrix.
"""

Activation = Literal["attn_input", "attn_result", "ffn_input", "ffn_middle"]
"""Activations that can be measured, by the matrices that read them.

- ``"attn_input"``: read by the matrices of queries, keys and values.
- ``"attn_result"``: read by the attention's output matrix.
- ``"ffn_input"``: read by the feed-forward block.
- ``"ffn_middle"``: read by ``ffn_down``; a mixture of experts has none.
"""


class Subscription(Protocol):
    """A tap on a context's graphs; it ends with the context at the latest."""

    def close(self) -> None:
        """End the subscription after the graph that is being computed; idempotent."""

    def __enter__(self) -> Self:
        """Return the subscription itself."""

    def __exit__(self, *_: object) -> None:
        """End the subscription."""


class AttentionDensity(Subscription, Protocol):
    """Information density of KV positions (LLMS §3.2, Eq 1), accumulated while subscribed."""

    def read(self, n: int) -> tuple[NDArray[np.float64], NDArray[np.uint64]]:
        """Return summed attention and score counts for positions 0…n-1, each of shape ``(n,)``.

        Their ratio is the density: the mean over all queries, heads and layers that can see the
        position. A position starts again at 0 when another token is evaluated there.
        """

    def take(self, n: int) -> tuple[NDArray[np.float64], NDArray[np.uint64]]:
        """Return the same as ``read``, then start these positions again at 0."""

    def cells(self, n: int) -> NDArray[np.int32]:
        """Return the cells of positions 0…n-1 for ``place``; shape ``(n_layers, n)``.

        The result stays valid as long as some sequence has these cells.
        """

    def place(self, kept: int, n: int, cells: NDArray[np.int32] | None = None) -> None:
        """Announce that sequence 0 gets cells that no graph fills.

        All positions from ``kept`` on start again at 0.

        Args:
            kept: Number of leading positions that stay as they are.
            n: End of the new positions: kept…n-1 are restored next, in order of position. Some of
                them may be evaluated instead.
            cells: Cells of positions 0…n-1, as ``cells(n)`` returned them, if the new positions
                still lie there and are not restored.
        """

    def reset(self) -> None:
        """Forget all sums and counts, and which cells hold which positions."""


class HiddenStates(Subscription, Protocol):
    """Rows of hidden states, in the order in which they were computed."""

    def take(self) -> NDArray[np.float32]:
        """Remove and return the rows since the last call; shape ``(n, n_embd)``, oldest first."""

    @property
    def n_lost(self) -> int:
        """Number of rows that were overwritten before any ``take``."""


class Magnitudes(Subscription, Protocol):
    """Histogram of an activation's magnitudes, counted while subscribed."""

    def read(self, layer: int) -> tuple[NDArray[np.uint64], NDArray[np.float64]]:
        """Return a layer's value counts by bucket of magnitude, and summed magnitudes by channel.

        The counts have shape ``(16320,)``. The bucket of value x is the float32 bits of ``abs(x)``,
        shifted right by 17. A bucket is at most 1.6 % wide. Values that are not finite are in no
        bucket. The layer must be one that the subscription counts.
        """


class Moments(Subscription, Protocol):
    """Sums of an activation's values and of their squares, accumulated while subscribed."""

    def read(self, layer: int) -> tuple[int, NDArray[np.float64], NDArray[np.float64]]:
        """Return a layer's number of rows, and by channel the sums of values and of squares.

        Channels that a level leaves out of a row count as zeros. A row whose channels are all left
        out is not counted. The layer must be one that the subscription counts.
        """


class Overlap(Subscription, Protocol):
    """Counts of large values that are large in an earlier layer, too, while subscribed."""

    def read(self, layer: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Return how many of a layer's values reached each threshold, here and in both layers.

        Only rows that the predictor also computed are counted; zeros if nothing predicts the layer.
        The layer must be one that the subscription counts.
        """
