"""Predict ActiveFlow's pipeline for a model on a machine, with its cost model (``cost_model``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from llmaas_plugins.flash_weights.cost_model import Cost, System
from llmaas_plugins.flash_weights.engine_modes import ARENA_BYTES, Hardware, Prediction, fixed_bytes
from llmaas_plugins.flash_weights.locality import cached_shares, use_rates
from llmaas_plugins.flash_weights.model_sizes import ModelSizes

__all__ = ["SIMILARITY", "HitRate", "hit_rate_between", "predict_pipeline", "system_of"]

HitRate = Callable[[float, float], float]
"""Function from the share of the channels in the cache and the sparsity to the hit rate."""

SIMILARITY: Mapping[str, float] = MappingProxyType(
    {"attn_qkv": 0.77, "attn_output": 0.5, "ffn_up": 0.77, "ffn_down": 0.5}
)
"""Share of a layer's active channels that are also active in the layer before, at half sparsity.

The values were measured in a small model. For two families they equal chance.
"""


def system_of(
    sizes: ModelSizes,
    machine: Hardware,
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
        m_kv=fixed_bytes(sizes, machine.process)
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


def predict_pipeline(
    sizes: ModelSizes, machine: Hardware, system: System, cost: Cost
) -> Prediction:
    """Predict the pipeline with one group size.

    Weights without channels are in memory and are computed with, too.
    """
    others = sizes.dense + sizes.experts * sizes.expert_share + sizes.scales
    missed = system.s_m * (1 - cost.sp) * (1 - cost.hr)
    return Prediction(
        mode="pipeline",
        sparsity=cost.sp,
        group_layers=cost.n,
        keeps=None,
        cache=int(min(cost.m_cache, system.s_m)),
        token_s=cost.t_decode + others / machine.bytes_per_s,
        read=missed * (1 + (1 - system.si) / cost.n),
        least_budget=int(cost.m_cl + system.m_kv),
    )


def _hit_rate(sizes: ModelSizes, share: float, sparsity: float) -> float:
    """Return the share of the used bytes that a cache of the busiest channels has."""
    used = found = 0.0
    for one in sizes.channels:
        rates = use_rates(one.means, sparsity)
        n_bytes = one.n_layers * one.n_bytes
        used += n_bytes * float(rates.sum())
        found += n_bytes * float(rates @ cached_shares(rates, share))
    return found / used
