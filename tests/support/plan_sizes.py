"""Sizes of a model of 1 B weights, a machine, and plans for both."""

from __future__ import annotations

from llmaas_plugins.flash_weights.channel_use import assumed_foreseen
from llmaas_plugins.flash_weights.disk import Disk
from llmaas_plugins.flash_weights.engine_modes import Hardware
from llmaas_plugins.flash_weights.locality import typical_means
from llmaas_plugins.flash_weights.model_sizes import ChannelBytes, ModelSizes
from llmaas_plugins.flash_weights.planner import make_plan
from llmaas_plugins.flash_weights.shares import equal_share

MIB = 1 << 20
MACHINE = Hardware(Disk(8e-6, 1.5e9, 64, 4, ()), 10e9, 60 * MIB)
FIXED = (60 + 10 + 16 + 20 + 6) * MIB
"""Process, resident weights, cells, a Llama, and the spare."""
BUFFERS = 33 * MIB


def channels(family, n_channels, n_bytes, n_layers=16):
    means, foreseen = typical_means(family, n_channels), assumed_foreseen(family)
    return ChannelBytes(
        family, n_layers, n_channels, n_bytes, n_bytes, means, equal_share(), foreseen
    )


PARTS = (
    channels("attn_qkv", 2048, 1536),
    channels("attn_output", 2048, 1024),
    channels("ffn_up", 2048, 8192),
    channels("ffn_down", 8192, 1024),
)
IN_CHANNELS = sum(part.all_bytes for part in PARTS)
SIZES = ModelSizes(
    n_layers=16,
    streamed=530 * MIB,
    experts=0,
    expert_share=1.0,
    least_experts=0,
    largest=0,
    resident=10 * MIB,
    kv=16 * MIB,
    buffers=BUFFERS,
    work=0,
    app=20 * MIB,
    channels=PARTS,
    dense=8 * MIB,
    scales=58 * MIB,
)


def plan(budget_mib, sparsity=0.5, sizes=SIZES, machine=MACHINE):
    return make_plan(sizes, machine, budget_mib * MIB, sparsity)


def sparse(*args, keeps="shared", preload=False, **known):
    """Return the sparse row of a plan."""
    rows = plan(*args, **known).sparse
    return next(row for row in rows if (row.keeps, row.preload) == (keeps, preload))
