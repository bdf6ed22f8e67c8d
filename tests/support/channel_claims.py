"""Claims of the channels of a model's matrices, and tokens computed with them."""

from __future__ import annotations

import re

import numpy as np
from claiming import Claimer, native, opened, step

from llmaas_hooks import (
    ChannelColumns,
    ChannelOperand,
    WeightClaim,
)
from llmaas_patches.native.packing import model_tensors
from llmaas_plugins.flash_weights.calibration import Activity
from llmaas_plugins.flash_weights.channel_layout import channel_operands
from llmaas_plugins.flash_weights.channels import open_scales
from llmaas_plugins.flash_weights.operands import FAMILIES
from llmaas_plugins.flash_weights.packed import streamable
from llmaas_plugins.flash_weights.shares import SPARSITIES

ARENA = 8 << 20
TOKENS = [1, 400, 401, 402, 403, 404, 300, 200, 100, 50, 60, 70, 80]


def calibrated(tensors):
    """Return a calibration with thresholds that are never reached, and random channel orders."""
    rng = np.random.default_rng(5)
    thresholds = np.linspace(1, 2, len(SPARSITIES), dtype=np.float32)
    return {
        operand: Activity(thresholds, rng.random(operand.n_channels, np.float32))
        for operand in channel_operands(tensors)
    }


def operands(file, *, threshold=None, share=None, by_layer=False, cache="recent"):
    """Return a channel file's operands; a threshold or a share selects the values that are used."""
    with open_scales(file) as read_scales:
        for number, found in enumerate(file.operands.values()):
            yield ChannelOperand(
                pool=number if by_layer else list(FAMILIES).index(found.operand.family),
                n_bytes=found.n_bytes,
                offset=found.first,
                stride=found.stride,
                order=found.order.astype(np.uint32),
                cache=cache,
                threshold=threshold or 0.0,
                n_top=round(share * found.operand.n_channels) if share is not None else 0,
                columns=tuple(
                    ChannelColumns(piece.name, piece.n_bits, piece.offset, *read_scales(piece))
                    for piece in found.pieces
                ),
            )


def claim_all(path):
    """Claim the matrices that graphs multiply with."""
    names = [name for name in streamable(model_tensors(path)) if name != "token_embd.weight"]
    return WeightClaim("|".join(map(re.escape, names)), source="file")


def at(file):
    return str(file.path), file.stamp


def attach(plugin, file, kept=1 << 30, **selection):
    for context in plugin.contexts:
        context.sparse_tokens = True
    weights = plugin.contexts[0].file_weights()
    for operand in operands(file, **selection):
        weights.add_operand(*at(file), operand)
    weights.set_memory(kept, ARENA)
    return weights


def one_by_one(ctx, tokens=TOKENS, start=0):
    return np.concatenate([step(ctx, [token], start + i) for i, token in enumerate(tokens)])


def sparse(path, file, kept=1 << 30, **selection):
    """Return the logits of tokens that are evaluated one by one with sparse products."""
    plugin = Claimer(claim_all(path))
    with native(plugin=plugin), opened(path, use_extra_bufts=False) as ctx:
        attach(plugin, file, kept, **selection)
        return one_by_one(ctx)


def divergence(expected, found):
    """Return the mean Kullback-Leibler divergence of next-token distributions, in nats."""
    p, q = (x - np.logaddexp.reduce(x, axis=-1, keepdims=True) for x in (expected, found))
    return float((np.exp(p) * (p - q)).sum(-1).mean())
