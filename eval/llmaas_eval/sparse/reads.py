"""Cost of reads of missing channels; one read covers channels with few bytes between them.

The channels are those of a small model. The cost is that of a larger model whose channels are used
alike: each of its operands corresponds to several of the small model's, with records of its own
size.
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
    """A device whose reads each take ``read_us``, plus a time for each byte."""

    read_us: float = 9.0
    bytes_per_us: float = 1500.0

    @property
    def gap_bytes(self) -> float:
        """Largest gap in bytes that is cheaper to read than to skip with another read."""
        return self.read_us * self.bytes_per_us


class Operands(NamedTuple):
    """Operands of a family in a model."""

    n_layers: int
    n_channels: int
    record_bytes: int


ONE_BILLION: Mapping[str, Operands] = {
    "attn_qkv": Operands(16, 2048, 1536),
    "attn_output": Operands(16, 2048, 1024),
    "ffn_up": Operands(16, 2048, 8192),
    "ffn_down": Operands(16, 8192, 1024),
}
"""Operands of a model with 1.2 billion weights of 4 bits, by family."""


class Cost(NamedTuple):
    """Cost of reads.

    Attributes:
        n_reads: Number of reads.
        n_bytes: Bytes that they read, gaps included.
        us: Time that they take in microseconds.
    """

    n_reads: float
    n_bytes: float
    us: float

    def scaled(self, by: float) -> Cost:
        """Return the cost of ``by`` times these reads."""
        return Cost(*(by * value for value in self))


def coalesced(missing: Flags, unit_bytes: int, flash: Flash, n_apart: int = 1) -> Cost:
    """Return the cost of reading each row's missing units, where rows lie far from each other.

    Args:
        missing: Flags of shape ``(n_rows, n_units)``, in the order of the file.
        unit_bytes: Bytes of a unit.
        flash: Device to read from.
        n_apart: Distance of a row's neighboring units, in units; the units between belong to other
            rows.
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
    """Reads for one family and one token.

    Attributes:
        ahead: Cost of reading predicted channels while earlier layers are computed.
        on_demand: Cost of reads that the computation waits for.
    """

    ahead: Cost
    on_demand: Cost


def predicted(trace: Trace, n_group: int) -> Flags:
    """Return the channels read ahead for groups of layers, shaped like ``Trace.decoded``.

    The active channels of a group's first layer predict the next group's. The first group has no
    group before it, so its own first layer predicts it.
    """
    active, starts = trace.decoded, np.arange(0, trace.active.shape[2], n_group)
    sources = np.concatenate([starts[:1], starts[:-1]])
    return active[:, np.repeat(sources, n_group)]


def busiest_first(trace: Trace, n_group: int) -> Order:
    """Return each group's channels, busiest on the calibration text first.

    A channel's count is summed over the layers of the group.
    """
    n_layers, n_channels = trace.busy.shape
    busy = trace.busy.reshape(n_layers // n_group, n_group, n_channels).sum(axis=1)
    return np.argsort(-busy, axis=1, kind="stable")


def read_cost(
    misses: Misses, order: Order, n_group: int, operands: Operands, flash: Flash
) -> Reads:
    """Return a token's mean read cost if the file stores a group's layers channel by channel.

    Args:
        misses: Misses of a small model.
        order: Order of the channels in the file.
        n_group: Number of layers in a group.
        operands: Operands of the model whose reads are counted.
        flash: Device to read from.
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
    """Return flags of shape ``(n_tokens, n_groups, n_group, n_channels)`` in the file's order."""
    n_tokens, n_layers, n_channels = flags.shape
    grouped = flags.reshape(n_tokens, n_layers // n_group, n_group, n_channels)
    return np.take_along_axis(grouped, order[None, :, None, :], axis=-1)
