"""Which mode is faster with a memory budget: what each would take for a token, before it is tried.

The rows `exact` and `sparse` are of what the engine does; those of `pipeline` are ActiveFlow's cost
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
"""Those, and one that is not planned."""
HitRate = Callable[[float, float], float]
"""Of a cache with this share of the channels, at this sparsity."""

SIMILARITY: Mapping[str, float] = MappingProxyType(
    {"attn_qkv": 0.77, "attn_output": 0.5, "ffn_up": 0.77, "ffn_down": 0.5}
)
"""Share of a layer's active channels that the layer before has, at half sparsity: as measured in a
small model; for two families that is what chance would have."""
MOST_SPARSITY = 0.95

ARENA_BYTES = 32 << 20
_RING = 4 << 20
_PIECE = 2 << 20
"""Of the engine, as are those before."""
_LEAST_SPEEDUP = 1.25
"""Of the sparse mode, which changes the text: less is not worth that, nor when all weights fit."""
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Machine:
    """What a model runs on.

    Attributes:
        disk: Under its files.
        bytes_per_s: Of weights in memory that are computed with.
        process: Bytes of a process without a model.
    """

    disk: Disk
    bytes_per_s: float
    process: int


@dataclass(frozen=True, slots=True)
class Row:
    """What a token would take.

    Attributes:
        mode: ``exact`` and ``sparse`` are the engine's; ``pipeline`` is ActiveFlow's.
        sparsity: Share of an activation's values that is left out.
        group_layers: N: layers whose channels are read at once; 0: no channels are read.
        cache: Bytes of weights that stay in memory.
        keeps: ``cache`` of the sparse mode: which channels stay; None: of another mode.
        token_s: Seconds for a token.
        read: Bytes that are read for it.
        least_budget: Memory of the process with which it works at all.
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
    """What was compared.

    Attributes:
        budget: Memory of the process.
        sparsity: That was asked for, or ActiveFlow's for the budget.
        exact: The exact mode.
        sparse: The sparse one, by what it keeps; none where the model has no channels.
        pipeline: Each group size that was tried, up to where the search stopped.
        search: Which is ActiveFlow's choice, and why no more were tried; None without channels.
        recommended: One of the engine's.
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
        """Of those that work with the budget."""
        return _fastest(self.budget, self.sparse)


def make_plan(  # noqa: PLR0913 -- of what, on what, in how much, and what is known of it
    sizes: ModelSizes,
    machine: Machine,
    budget: int,
    sparsity: float | None = None,
    *,
    similarity: Mapping[str, float] = SIMILARITY,
    hit_rate: HitRate | None = None,
) -> Plan:
    """Compare what the engine can do with a budget, and what ActiveFlow would.

    Args:
        sizes: Of the model.
        machine: That it runs on.
        budget: Memory of the process.
        sparsity: Share of values left out; the paper's ``1 - M_max / S_m`` when None.
        similarity: Of neighbouring layers' active channels, by family.
        hit_rate: What is known of the cache (``hit_rate_between``); else what follows from how
            large channels are.

    Raises:
        BudgetError: No mode works with so little.
    """
    check_budget(sizes, machine.process, budget)
    exact = _exact(sizes, machine, budget)
    if not sizes.channels:
        return Plan(budget, 0.0, exact, (), (), None, exact)
    system = system_of(sizes, machine, budget, similarity, hit_rate)
    chosen = min(system.sp, MOST_SPARSITY) if sparsity is None else sparsity
    kinds: tuple[Keeps, ...] = ("busiest", "shared")
    sparse = tuple(_sparse(sizes, machine, budget, chosen, keeps=keeps) for keeps in kinds)
    if sparse[0].group_layers == 1:  # else channels of one layer alone are not read at once
        sparse = (_read_ahead(sizes, machine, budget, chosen), *sparse)
    recommended = _recommended(exact, _fastest(budget, sparse))
    search = search_group(system, chosen)
    pipeline = tuple(_pipeline(sizes, machine, system, cost) for cost in search.tried)
    return Plan(budget, chosen, exact, sparse, pipeline, search, recommended)


def check_budget(sizes: ModelSizes, process: int, budget: int) -> None:
    """See whether a model runs at all in so much memory: in the exact mode, which needs less.

    Args:
        sizes: Of the model.
        process: Bytes of a process without it.
        budget: Memory of the process with it.

    Raises:
        BudgetError: It does not.
    """
    require(budget, least_budget(sizes, process))


def least_budget(
    sizes: ModelSizes, process: int, keeps: Cache | None = None, arena: int = ARENA_BYTES
) -> int:
    """Return the least memory of a process in which a model can be loaded and runs.

    Args:
        sizes: Of the model.
        process: Bytes of the process without it.
        keeps: ``cache`` of the sparse mode; None for the exact mode.
        arena: Memory that streamed weights pass through.
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
    """A model on a machine in the symbols of ActiveFlow's Table 1."""
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
    """The hit rate of a cache from what was measured.

    Args:
        points: Hit rates by the cache's share of the channels. Nothing is found in no cache, and
            all in one that has them all.
    """
    known = {0.0: 0.0, 1.0: 1.0} | dict(points)
    shares = sorted(known)
    rates = [known[share] for share in shares]
    return lambda share, _sparsity: float(np.interp(share, shares, rates))


# -- the engine ----------------------------------------------------------------------------------


def _fixed(sizes: ModelSizes, process: int) -> int:
    """What the process has beside streamed weights; what batches compute in, tokens give back."""
    own = sizes.resident + sizes.kv + sizes.app
    return process + own + SPARE_BYTES


def _through(sizes: ModelSizes, keeps: Cache | None, arena: int) -> int:
    """Return the bytes that weights are read through, and those of the sparse mode beside them."""
    widest = max((one.layer_bytes for one in sizes.channels), default=0)
    if keeps is None:
        return arena
    if keeps == "streamed":  # an activation's channels are used together
        return max(arena, widest + 2 * _PIECE) + sizes.scales
    return arena + sizes.scales + _RING + widest // 2


def _least(sizes: ModelSizes) -> int:
    """Beside what weights are read through."""
    return sizes.buffers + sizes.least_experts


def _exact(sizes: ModelSizes, machine: Machine, budget: int) -> Row:
    """Reading and computing overlap: the longer of both counts."""
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
    """All channels that are not kept are read, as the exact mode reads weights."""
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
    """Channels are read when they are known; only other weights are read ahead."""
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
    """Bytes that a token computes with."""
    others = sizes.dense + sizes.experts * sizes.expert_share + sizes.scales
    return others + sizes.in_channels * (1 - sparsity)


def _streamed(plain: int, sizes: ModelSizes, room: int) -> float:
    """Bytes read for a token when so many are kept: experts get what other weights leave."""
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
    """Of what is used, the bytes that a cache of the busiest channels has."""
    used = found = 0.0
    for one in sizes.channels:
        rates = use_rates(one.means, sparsity)
        n_bytes = one.n_layers * one.n_bytes
        used += n_bytes * float(rates.sum())
        found += n_bytes * float(rates @ cached_shares(rates, share))
    return found / used


def _pipeline(sizes: ModelSizes, machine: Machine, system: System, cost: Cost) -> Row:
    """A size of groups; weights without channels are in memory, and computed with, as well."""
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
