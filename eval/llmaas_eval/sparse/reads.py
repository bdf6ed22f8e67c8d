"""What reads of missing channels cost, coalesced where the bytes between them are few.

The channels are those of a small model and the cost is of a larger one's whose channels are used
alike: each of its operands is several of the small one's, with records of its own size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.sparse.policies import Flags, Misses, Trace

__all__ = [
    "ONE_BILLION",
    "Cost",
    "Flash",
    "Operands",
    "Reads",
    "busiest_first",
    "coalesced",
    "predicted",
    "read_cost",
]

Order = NDArray[np.int64]
"""Channels of each group in the order of the file, ``(n_groups, n_channels)``."""


class Flash(NamedTuple):
    """A device that takes ``read_us`` for each read, and its time for each byte."""

    read_us: float = 9.0
    bytes_per_us: float = 1500.0

    @property
    def gap_bytes(self) -> float:
        """Up to which reading on is cheaper than another read."""
        return self.read_us * self.bytes_per_us


class Operands(NamedTuple):
    """A family's in a model."""

    n_layers: int
    n_channels: int
    record_bytes: int


ONE_BILLION: Mapping[str, Operands] = {
    "attn_qkv": Operands(16, 2048, 1536),
    "attn_output": Operands(16, 2048, 1024),
    "ffn_up": Operands(16, 2048, 8192),
    "ffn_down": Operands(16, 8192, 1024),
}
"""Of a model of 1.2 billion weights at 4 bits."""


class Cost(NamedTuple):
    """Of reads.

    Attributes:
        n_reads: How many.
        n_bytes: What they read, gaps included.
        us: How long they take.
    """

    n_reads: float
    n_bytes: float
    us: float

    def scaled(self, by: float) -> Cost:
        """So many times these reads."""
        return Cost(*(by * value for value in self))


def coalesced(missing: Flags, unit_bytes: int, flash: Flash, n_apart: int = 1) -> Cost:
    """Reading the missing units of each row, in rows that are far from each other.

    Args:
        missing: Shape ``(n_rows, n_units)``, in the order of the file.
        unit_bytes: Of a unit.
        flash: What is read from.
        n_apart: Units from one to the next, where those between them are of other rows.
    """
    rows, at = np.nonzero(missing)
    if not len(at):
        return Cost(0, 0, 0)
    gaps = (np.diff(at) * n_apart - 1) * unit_bytes
    joined = (np.diff(rows) == 0) & (gaps <= flash.gap_bytes)
    n_reads = len(at) - int(joined.sum())
    n_bytes = len(at) * unit_bytes + int(gaps[joined].sum())
    return Cost(n_reads, n_bytes, n_reads * flash.read_us + n_bytes / flash.bytes_per_us)


class Reads(NamedTuple):
    """A token's, of a family.

    Attributes:
        ahead: Of predicted channels, while layers before are computed.
        on_demand: That the computation waits for.
    """

    ahead: Cost
    on_demand: Cost


def predicted(trace: Trace, n_group: int) -> Flags:
    """What is read ahead for groups of layers, shaped like ``Trace.decoded``.

    The first layer of a group tells what the next group will need, while there is time. What the
    first group needs is told by its own first layer.
    """
    active, starts = trace.decoded, np.arange(0, trace.active.shape[2], n_group)
    sources = np.concatenate([starts[:1], starts[:-1]])
    return active[:, np.repeat(sources, n_group)]


def busiest_first(trace: Trace, n_group: int) -> Order:
    """By how busy a channel was on the calibration text, over the layers of a group."""
    n_layers, n_channels = trace.busy.shape
    busy = trace.busy.reshape(n_layers // n_group, n_group, n_channels).sum(axis=1)
    return np.argsort(-busy, axis=1, kind="stable")


def read_cost(
    misses: Misses, order: Order, n_group: int, operands: Operands, flash: Flash
) -> Reads:
    """Mean of a token's reads, when the file has the layers of a group channel by channel.

    Args:
        misses: Of a small model.
        order: Of the file.
        n_group: Layers of a group.
        operands: Of the model whose reads these are.
        flash: What is read from.
    """
    n_tokens, n_layers, n_channels = misses.demanded.shape
    scale = operands.n_layers / n_layers * operands.n_channels / n_channels / n_tokens
    ahead = _in_order(misses.preloaded, order, n_group).swapaxes(2, 3)
    on_demand = _in_order(misses.demanded, order, n_group)
    size = operands.record_bytes
    return Reads(
        coalesced(ahead.reshape(-1, n_channels * n_group), size, flash).scaled(scale),
        coalesced(on_demand.reshape(-1, n_channels), size, flash, n_group).scaled(scale),
    )


def _in_order(flags: Flags, order: Order, n_group: int) -> Flags:
    """Shape ``(n_tokens, n_groups, n_group, n_channels)``, channels as the file has them."""
    n_tokens, n_layers, n_channels = flags.shape
    grouped = flags.reshape(n_tokens, n_layers // n_group, n_group, n_channels)
    return np.take_along_axis(grouped, order[None, :, None, :], axis=-1)
