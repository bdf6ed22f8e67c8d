"""Predict the time per token and the memory of the engine's modes, ``exact`` and ``sparse``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from llmaas_plugins import process_memory
from llmaas_plugins.flash_weights.disk import Disk
from llmaas_plugins.flash_weights.locality import (
    Reads,
    Shares,
    cached_shares,
    expected_reads,
    use_rates,
)
from llmaas_plugins.flash_weights.model_sizes import ChannelBytes, ModelSizes

__all__ = [
    "ARENA_BYTES",
    "Hardware",
    "Keeps",
    "Prediction",
    "fixed_bytes",
    "least_budget",
    "predict_exact",
    "predict_sparse",
    "predict_streamed",
]

Mode = Literal["exact", "sparse", "pipeline"]
Keeps = Literal["streamed", "busiest", "shared"]
Cache = Literal["streamed", "busiest", "shared", "layer"]
"""Caches of the sparse mode. The planner predicts all of them except ``layer``."""

ARENA_BYTES = 32 << 20
_RING = 4 << 20
_PIECE = 2 << 20
"""Largest piece that the engine reads. Like the two sizes above, it mirrors the engine."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """Machine that runs a model.

    Attributes:
        disk: Disk under the model's files.
        bytes_per_s: Bytes per second of computing with weights in memory.
        process: Bytes of a process without a model.
    """

    disk: Disk
    bytes_per_s: float
    process: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted cost of a token.

    Attributes:
        mode: ``exact`` and ``sparse`` are the engine's modes; ``pipeline`` is ActiveFlow's.
        sparsity: Share of all channels' weights that is left out.
        group_layers: N, layers whose channels are read at once; 0 if no channels are read.
        cache: Bytes of weights that stay in memory.
        keeps: Cache of the sparse mode, which decides which channels stay; None in other modes.
        preload: Whether channels for the next group of layers are read ahead.
        token_s: Seconds per token.
        read: Bytes read per token.
        least_budget: Least memory of the process in bytes.
    """

    mode: Mode
    sparsity: float
    group_layers: int
    keeps: Keeps | None
    preload: bool
    cache: int
    token_s: float
    read: float
    least_budget: int


def least_budget(
    sizes: ModelSizes,
    process: int,
    keeps: Cache | None = None,
    arena: int = ARENA_BYTES,
    *,
    preload: bool = False,
) -> int:
    """Return the least memory of a process in which a model can be loaded and run.

    Args:
        sizes: Sizes of the model.
        process: Bytes of the process without the model.
        keeps: Cache of the sparse mode; None for the exact mode.
        arena: Bytes of the buffer that streamed weights pass through.
        preload: Whether channels are read ahead, into memory as large as the arena.
    """
    loading = process + sizes.resident + sizes.app + sizes.largest
    running = fixed_bytes(sizes, process) + _through(sizes, keeps, arena) + _least(sizes)
    running += arena if preload else 0
    return max(loading, running)


def fixed_bytes(sizes: ModelSizes, process: int) -> int:
    """Return the bytes of the process beside streamed weights and compute buffers.

    Compute buffers are not counted: decoding releases them.
    """
    own = sizes.resident + sizes.kv + sizes.app + sizes.work
    return process + own + process_memory.SPARE_BYTES


def _through(sizes: ModelSizes, keeps: Cache | None, arena: int) -> int:
    """Return the bytes of buffers that weights are read through, plus the sparse mode's scales."""
    widest = max((one.layer_bytes for one in sizes.channels), default=0)
    if keeps is None:
        return arena
    if keeps == "streamed":  # all channels of an activation are in memory together
        return max(arena, widest + 2 * _PIECE) + sizes.scales
    return arena + sizes.scales + _RING + widest // 2


def _least(sizes: ModelSizes) -> int:
    """Return the least bytes beside fixed memory and read buffers."""
    return sizes.buffers + sizes.least_experts


def predict_exact(sizes: ModelSizes, machine: Hardware, budget: int) -> Prediction:
    """Predict the exact mode, whose reading and computing overlap: the longer one counts."""
    room = max(0, budget - fixed_bytes(sizes, machine.process) - _through(sizes, None, ARENA_BYTES))
    read = _streamed(sizes.streamed - sizes.experts, sizes, room)
    return Prediction(
        mode="exact",
        sparsity=0.0,
        group_layers=0,
        keeps=None,
        preload=False,
        cache=min(room, sizes.streamed),
        token_s=max(sizes.used / machine.bytes_per_s, read / machine.disk.bytes_per_s),
        read=read,
        least_budget=least_budget(sizes, machine.process),
    )


def predict_streamed(
    sizes: ModelSizes, machine: Hardware, budget: int, sparsity: float
) -> Prediction:
    """Predict the sparse mode that reads all channels that are not kept, as the exact mode does."""
    through = fixed_bytes(sizes, machine.process) + _through(sizes, "streamed", ARENA_BYTES)
    room = max(0, budget - through)
    plain = sizes.dense + sizes.in_channels
    read = _streamed(plain, sizes, room)
    computing_s = _used_sparse(sizes, sparsity) / machine.bytes_per_s
    return Prediction(
        mode="sparse",
        sparsity=sparsity,
        group_layers=1,
        keeps="streamed",
        preload=False,
        cache=min(room, plain + sizes.experts),
        token_s=max(computing_s, read / machine.disk.bytes_per_s),
        read=read,
        least_budget=least_budget(sizes, machine.process, "streamed"),
    )


def predict_sparse(  # noqa: PLR0913 -- model, machine, budget, and the mode's settings
    sizes: ModelSizes,
    machine: Hardware,
    budget: int,
    sparsity: float,
    *,
    keeps: Keeps,
    preload: bool = False,
) -> Prediction:
    """Predict the sparse mode that reads channels on demand and only other weights ahead.

    A token takes ``T_onload + max(T_preload, T_comp)`` (ActiveFlow, Eqs 5 to 7). The engine reads
    ahead only while it computes, so ``T_preload`` is at most ``T_comp``: whatever was not read by
    then is read on demand. Without preloading, ``T_preload`` is 0.
    """
    through = fixed_bytes(sizes, machine.process) + _through(sizes, keeps, ARENA_BYTES)
    room = max(0, budget - through - (ARENA_BYTES if preload else 0))
    cache = min(max(0, room - sizes.dense - sizes.experts), sizes.in_channels)
    computing_s = _used_sparse(sizes, sparsity) / machine.bytes_per_s
    dense = _streamed(sizes.dense, sizes, room)
    dense_s = dense / machine.disk.bytes_per_s
    use = _Use(sizes, cache / sizes.in_channels, sparsity, keeps, machine.disk.gap_bytes)
    ahead, done = Reads(0, 0), 0.0
    if preload:
        ahead = use.reads_ahead()
        ahead_s = _seconds(ahead, machine.disk)
        done = min(1.0, max(0.0, computing_s - dense_s) / ahead_s) if ahead_s else 1.0
    demanded = use.reads(done)
    return Prediction(
        mode="sparse",
        sparsity=sparsity,
        group_layers=round(sizes.channels[0].stride / sizes.channels[0].n_bytes),
        keeps=keeps,
        preload=preload,
        cache=min(room, sizes.dense + sizes.experts + cache),
        token_s=_seconds(demanded, machine.disk) + max(computing_s, dense_s),
        read=demanded.n_bytes + done * ahead.n_bytes + dense,
        least_budget=least_budget(sizes, machine.process, keeps, preload=preload),
    )


def _used_sparse(sizes: ModelSizes, sparsity: float) -> float:
    """Return the bytes that a token computes with."""
    others = sizes.dense + sizes.experts * sizes.expert_share + sizes.scales
    return others + sizes.in_channels * (1 - sparsity)


def _streamed(plain: int, sizes: ModelSizes, room: int) -> float:
    """Return the bytes read per token; experts get the room that other weights leave."""
    missing = max(0, plain - room)
    if sizes.experts:
        kept = min(1.0, max(sizes.least_experts, room - plain) / sizes.experts)
        return missing + sizes.experts * sizes.expert_share * (1 - kept)
    return missing


def _seconds(reads: Reads, disk: Disk) -> float:
    return reads.n_reads * disk.read_s + reads.n_bytes / disk.bytes_per_s


class _Use(NamedTuple):
    """Use of channels by a token.

    Attributes:
        sizes: Sizes of the model.
        share: Share of the channels in the cache.
        sparsity: Share of the channels' weights that is left out.
        keeps: The cache.
        gap_bytes: Longest gap between channels that is read with them.
    """

    sizes: ModelSizes
    share: float
    sparsity: float
    keeps: Keeps
    gap_bytes: int

    def reads(self, done: float = 0.0) -> Reads:
        """Return the reads on demand, if the share ``done`` of the foreseen channels is there."""
        total = Reads(0, 0)
        for one in self.sizes.channels:
            missing = self._missing(one) * (1 - done * one.foreseen_at(self.sparsity))
            reads = expected_reads(missing, one.n_bytes, one.stride, self.gap_bytes)
            total += Reads(*(one.n_layers * number for number in reads))
        return total

    def reads_ahead(self) -> Reads:
        """Return the reads of all channels that the group before makes likely.

        A record has a channel's columns in all layers of a group. Nothing predicts the first group.
        """
        total = Reads(0, 0)
        for one in self.sizes.channels:
            n_groups = max(0.0, one.n_layers * one.n_bytes / one.stride - 1)
            reads = expected_reads(self._missing(one), one.stride, one.stride, self.gap_bytes)
            total += Reads(*(n_groups * number for number in reads))
        return total

    def _missing(self, one: ChannelBytes) -> Shares:
        """Return the share of tokens for which each channel is used, but not in the cache."""
        rates = use_rates(one.means, one.left_out(self.sparsity))
        busiest = np.arange(one.n_channels) < self.share * one.n_channels
        cached = busiest if self.keeps == "busiest" else cached_shares(rates, self.share)
        return rates * (1 - cached)
