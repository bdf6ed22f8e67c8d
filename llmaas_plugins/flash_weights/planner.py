"""Predict which mode is faster with a memory budget, from the time per token of each.

The rows ``exact`` and ``sparse`` describe the engine. The rows ``pipeline`` are ActiveFlow's cost
model (cost_model.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np

from llmaas_plugins.flash_weights.cost_model import Cost, Search, System, search_group
from llmaas_plugins.flash_weights.disk import Disk
from llmaas_plugins.flash_weights.locality import (
    Reads,
    cached_shares,
    expected_reads,
    use_rates,
)
from llmaas_plugins.flash_weights.memory import SPARE_BYTES, require
from llmaas_plugins.flash_weights.model_sizes import ModelSizes

__all__ = [
    "ARENA_BYTES",
    "MOST_SPARSITY",
    "SIMILARITY",
    "Machine",
    "Plan",
    "Row",
    "check_budget",
    "hit_rate_between",
    "least_budget",
    "make_plan",
    "system_of",
]

Mode = Literal["exact", "sparse", "pipeline"]
Keeps = Literal["streamed", "busiest", "shared"]
Cache = Literal["streamed", "busiest", "shared", "layer"]
"""Caches of the sparse mode. The planner predicts all of them except ``layer``."""
HitRate = Callable[[float, float], float]
"""Function from the share of the channels in the cache and the sparsity to the hit rate."""

SIMILARITY: Mapping[str, float] = MappingProxyType(
    {"attn_qkv": 0.77, "attn_output": 0.5, "ffn_up": 0.77, "ffn_down": 0.5}
)
"""Share of a layer's active channels that are also active in the layer before, at half sparsity.

The values were measured in a small model. For two families they equal chance.
"""
MOST_SPARSITY = 0.95

ARENA_BYTES = 32 << 20
_RING = 4 << 20
_PIECE = 2 << 20
"""Largest piece that the engine reads. Like the two sizes above, it mirrors the engine."""
_LEAST_SPEEDUP = 1.25
"""Least speedup at which the sparse mode is recommended, because it changes the text.

The sparse mode is never recommended when all weights fit.
"""
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Machine:
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
class Row:
    """Predicted cost of a token.

    Attributes:
        mode: ``exact`` and ``sparse`` are the engine's modes; ``pipeline`` is ActiveFlow's.
        sparsity: Share of an activation's values that is left out.
        group_layers: N, layers whose channels are read at once; 0 if no channels are read.
        cache: Bytes of weights that stay in memory.
        keeps: Cache of the sparse mode, which decides which channels stay; None in other modes.
        token_s: Seconds per token.
        read: Bytes read per token.
        least_budget: Least memory of the process in bytes.
    """

    mode: Mode
    sparsity: float
    group_layers: int
    keeps: Keeps | None
    cache: int
    token_s: float
    read: float
    least_budget: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Comparison of the modes.

    Attributes:
        budget: Memory of the process.
        sparsity: Requested sparsity, or ActiveFlow's for the budget.
        exact: Row of the exact mode.
        sparse: Rows of the sparse mode, by cache; empty if the model has no channels.
        pipeline: Row of each group size that the search tried.
        search: Search for ActiveFlow's group size; None without channels.
        recommended: The recommended row, one of the engine's.
    """

    budget: int
    sparsity: float
    exact: Row
    sparse: tuple[Row, ...]
    pipeline: tuple[Row, ...]
    search: Search | None
    recommended: Row

    @property
    def fastest_sparse(self) -> Row | None:
        """Fastest sparse row that works with the budget, or None."""
        return _fastest(self.budget, self.sparse)


def make_plan(  # noqa: PLR0913 -- model, machine, budget, and what is known of the cache
    sizes: ModelSizes,
    machine: Machine,
    budget: int,
    sparsity: float | None = None,
    *,
    similarity: Mapping[str, float] = SIMILARITY,
    hit_rate: HitRate | None = None,
) -> Plan:
    """Compare the engine's modes and ActiveFlow's pipeline under a budget.

    Args:
        sizes: Sizes of the model.
        machine: Machine that runs the model.
        budget: Memory of the process.
        sparsity: Share of values left out; None uses the paper's ``1 - M_max / S_m``.
        similarity: Similarity of the active channels of neighboring layers, by family.
        hit_rate: Measured hit rate of the cache (``hit_rate_between``). If None, it is predicted
            from the channels' magnitudes.

    Raises:
        UnmetBudgetError: No mode works with this budget.
    """
    check_budget(sizes, machine.process, budget)
    exact = _exact(sizes, machine, budget)
    if not sizes.channels:
        return Plan(budget, 0.0, exact, (), (), None, exact)
    system = system_of(sizes, machine, budget, similarity, hit_rate)
    chosen = min(system.sp, MOST_SPARSITY) if sparsity is None else sparsity
    kinds: tuple[Keeps, ...] = ("busiest", "shared")
    sparse = tuple(_sparse(sizes, machine, budget, chosen, keeps=keeps) for keeps in kinds)
    # Grouped channels of a single layer are not contiguous, so they cannot be read ahead.
    if sparse[0].group_layers == 1:
        sparse = (_read_ahead(sizes, machine, budget, chosen), *sparse)
    recommended = _recommended(exact, _fastest(budget, sparse))
    search = search_group(system, chosen)
    pipeline = tuple(_pipeline(sizes, machine, system, cost) for cost in search.tried)
    return Plan(budget, chosen, exact, sparse, pipeline, search, recommended)


def check_budget(sizes: ModelSizes, process: int, budget: int, n_ctx: int | None = None) -> None:
    """Check that a model runs within a budget in the exact mode, which needs the least memory.

    Args:
        sizes: Sizes of the model.
        process: Bytes of a process without the model.
        budget: Memory of the process with the model.
        n_ctx: Tokens of the context, for the error.

    Raises:
        UnmetBudgetError: The budget is too small.
    """
    require(budget, process, least_budget(sizes, 0), n_ctx)


def least_budget(
    sizes: ModelSizes, process: int, keeps: Cache | None = None, arena: int = ARENA_BYTES
) -> int:
    """Return the least memory of a process in which a model can be loaded and run.

    Args:
        sizes: Sizes of the model.
        process: Bytes of the process without the model.
        keeps: Cache of the sparse mode; None for the exact mode.
        arena: Bytes of the buffer that streamed weights pass through.
    """
    loading = process + sizes.resident + sizes.app + sizes.largest
    running = _fixed(sizes, process) + _through(sizes, keeps, arena) + _least(sizes)
    return max(loading, running)


def system_of(
    sizes: ModelSizes,
    machine: Machine,
    budget: int,
    similarity: Mapping[str, float] = SIMILARITY,
    hit_rate: HitRate | None = None,
) -> System:
    """Describe a model on a machine in the symbols of ActiveFlow's Table 1."""
    in_channels = sizes.in_channels

    def bw_flash(n: int) -> float:
        seconds = sum(
            one.n_layers / n * one.n_channels * machine.disk.seconds(n * one.n_bytes, 1)
            for one in sizes.channels
        )
        return in_channels / seconds

    return System(
        s_m=in_channels,
        n_layers=sizes.n_layers,
        m_max=budget,
        m_kv=_fixed(sizes, machine.process)
        + ARENA_BYTES
        + sizes.scales
        + sizes.dense
        + sizes.experts,
        si=sum(one.all_bytes * similarity[one.family] for one in sizes.channels) / in_channels,
        bw_mem=machine.bytes_per_s,
        bw_flash=bw_flash,
        hit_rate=hit_rate or (lambda share, sparsity: _hit_rate(sizes, share, sparsity)),
    )


def hit_rate_between(points: Mapping[float, float]) -> HitRate:
    """Return a hit rate interpolated between measured points.

    Args:
        points: Hit rates by the cache's share of the channels. The hit rate is 0 without a cache,
            and 1 if the cache holds all channels.
    """
    known = {0.0: 0.0, 1.0: 1.0} | dict(points)
    shares = sorted(known)
    rates = [known[share] for share in shares]
    return lambda share, _sparsity: float(np.interp(share, shares, rates))


# -- the engine ----------------------------------------------------------------------------------


def _fixed(sizes: ModelSizes, process: int) -> int:
    """Return the bytes of the process beside streamed weights and compute buffers.

    Compute buffers are not counted: decoding releases them.
    """
    own = sizes.resident + sizes.kv + sizes.app
    return process + own + SPARE_BYTES


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


def _exact(sizes: ModelSizes, machine: Machine, budget: int) -> Row:
    """Predict the exact mode, whose reading and computing overlap: the longer one counts."""
    room = max(0, budget - _fixed(sizes, machine.process) - _through(sizes, None, ARENA_BYTES))
    read = _streamed(sizes.streamed - sizes.experts, sizes, room)
    return Row(
        mode="exact",
        sparsity=0.0,
        group_layers=0,
        keeps=None,
        cache=min(room, sizes.streamed),
        token_s=max(sizes.used / machine.bytes_per_s, read / machine.disk.bytes_per_s),
        read=read,
        least_budget=least_budget(sizes, machine.process),
    )


def _read_ahead(sizes: ModelSizes, machine: Machine, budget: int, sparsity: float) -> Row:
    """Predict the sparse mode that reads all channels that are not kept, as the exact mode does."""
    through = _fixed(sizes, machine.process) + _through(sizes, "streamed", ARENA_BYTES)
    room = max(0, budget - through)
    plain = sizes.dense + sizes.in_channels
    read = _streamed(plain, sizes, room)
    computing_s = _used_sparse(sizes, sparsity) / machine.bytes_per_s
    return Row(
        mode="sparse",
        sparsity=sparsity,
        group_layers=1,
        keeps="streamed",
        cache=min(room, plain + sizes.experts),
        token_s=max(computing_s, read / machine.disk.bytes_per_s),
        read=read,
        least_budget=least_budget(sizes, machine.process, "streamed"),
    )


def _sparse(
    sizes: ModelSizes, machine: Machine, budget: int, sparsity: float, *, keeps: Keeps
) -> Row:
    """Predict the sparse mode that reads channels on demand and only other weights ahead."""
    through = _fixed(sizes, machine.process) + _through(sizes, keeps, ARENA_BYTES)
    room = max(0, budget - through)
    cache = min(max(0, room - sizes.dense - sizes.experts), sizes.in_channels)
    disk = machine.disk
    reads = _channel_reads(sizes, cache / sizes.in_channels, sparsity, keeps, disk.gap_bytes)
    dense = _streamed(sizes.dense, sizes, room)
    waiting_s = reads.n_reads * disk.read_s + reads.n_bytes / disk.bytes_per_s
    computing_s = _used_sparse(sizes, sparsity) / machine.bytes_per_s
    return Row(
        mode="sparse",
        sparsity=sparsity,
        group_layers=round(sizes.channels[0].stride / sizes.channels[0].n_bytes),
        keeps=keeps,
        cache=min(room, sizes.dense + sizes.experts + cache),
        token_s=waiting_s + max(computing_s, dense / disk.bytes_per_s),
        read=reads.n_bytes + dense,
        least_budget=least_budget(sizes, machine.process, keeps),
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


def _channel_reads(
    sizes: ModelSizes, share: float, sparsity: float, keeps: Keeps, gap_bytes: int
) -> Reads:
    total = Reads(0, 0)
    for one in sizes.channels:
        rates = use_rates(one.means, sparsity)
        busiest = np.arange(one.n_channels) < share * one.n_channels
        cached = busiest if keeps == "busiest" else cached_shares(rates, share)
        reads = expected_reads(rates * (1 - cached), one.n_bytes, one.stride, gap_bytes)
        total += Reads(*(one.n_layers * number for number in reads))
    return total


def _fastest(budget: int, rows: Iterable[Row]) -> Row | None:
    works = (row for row in rows if budget >= row.least_budget)
    return min(works, key=lambda row: row.token_s, default=None)


def _recommended(exact: Row, sparse: Row | None) -> Row:
    if exact.read == 0 or sparse is None:
        return exact
    return sparse if exact.token_s >= _LEAST_SPEEDUP * sparse.token_s else exact


# -- ActiveFlow ----------------------------------------------------------------------------------


def _hit_rate(sizes: ModelSizes, share: float, sparsity: float) -> float:
    """Return the share of the used bytes that a cache of the busiest channels has."""
    used = found = 0.0
    for one in sizes.channels:
        rates = use_rates(one.means, sparsity)
        n_bytes = one.n_layers * one.n_bytes
        used += n_bytes * float(rates.sum())
        found += n_bytes * float(rates @ cached_shares(rates, share))
    return found / used


def _pipeline(sizes: ModelSizes, machine: Machine, system: System, cost: Cost) -> Row:
    """Predict the pipeline with one group size.

    Weights without channels are in memory and are computed with, too.
    """
    others = sizes.dense + sizes.experts * sizes.expert_share + sizes.scales
    missed = system.s_m * (1 - cost.sp) * (1 - cost.hr)
    return Row(
        mode="pipeline",
        sparsity=cost.sp,
        group_layers=cost.n,
        keeps=None,
        cache=int(min(cost.m_cache, system.s_m)),
        token_s=cost.t_decode + others / machine.bytes_per_s,
        read=missed * (1 + (1 - system.si) / cost.n),
        least_budget=int(cost.m_cl + system.m_kv),
    )
