"""Predict ActiveFlow's pipeline for a model on a machine, with its cost model (``cost_model``)."""

from __future__ import annotations

from llmaas_plugins.flash_weights.cost_model import Cost, System
from llmaas_plugins.flash_weights.engine_modes import ARENA_BYTES, Hardware, Prediction, fixed_bytes
from llmaas_plugins.flash_weights.locality import cached_shares, use_rates
from llmaas_plugins.flash_weights.model_sizes import ModelSizes

__all__ = ["hit_rate", "predict_pipeline", "similarity", "system_of"]


def system_of(
    sizes: ModelSizes,
    machine: Hardware,
    budget: int,
    sparsity: float,
) -> System:
    """Describe a model on a machine in the symbols of ActiveFlow's Table 1.

    Similarity (si, Eq 6) is what the model's channels have at this sparsity. The hit rate (hr,
    Eqs 3, 6 and 7) follows from their magnitudes.
    """
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
        si=similarity(sizes, sparsity),
        bw_mem=machine.bytes_per_s,
        bw_flash=bw_flash,
        hit_rate=lambda share, sp: hit_rate(sizes, share, sp),
    )


def similarity(sizes: ModelSizes, sparsity: float) -> float:
    """Return the share of the active channels' bytes that the layer before foresees."""
    parts = [(one.all_bytes * (1 - one.left_out(sparsity)), one) for one in sizes.channels]
    return sum(used * one.foreseen_at(sparsity) for used, one in parts) / sum(
        used for used, _ in parts
    )


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
        preload=False,
        cache=int(min(cost.m_cache, system.s_m)),
        token_s=cost.t_decode + others / machine.bytes_per_s,
        read=missed * (1 + (1 - system.si) / cost.n),
        least_budget=int(cost.m_cl + system.m_kv),
    )


def hit_rate(sizes: ModelSizes, share: float, sparsity: float) -> float:
    """Return the share of the used bytes in a cache that holds ``share`` of the channels."""
    used = found = 0.0
    for one in sizes.channels:
        rates = use_rates(one.means, one.left_out(sparsity))
        n_bytes = one.n_layers * one.n_bytes
        used += n_bytes * float(rates.sum())
        found += n_bytes * float(rates @ cached_shares(rates, share))
    return found / used
