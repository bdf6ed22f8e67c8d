"""How a model's channels are used: measured when its channel file was made, or assumed."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_plugins.flash_weights.channel_header import Contents
from llmaas_plugins.flash_weights.locality import Shares, typical_means
from llmaas_plugins.flash_weights.shares import SPARSITIES, Share

__all__ = ["SIMILARITY", "ChannelUse", "assumed_foreseen", "channel_uses", "means_of"]

SIMILARITY: Mapping[str, float] = MappingProxyType(
    {"attn_qkv": 0.77, "attn_output": 0.5, "ffn_up": 0.77, "ffn_down": 0.5}
)
"""Share of a layer's active channels that are also active in the layer before, at half sparsity.

The values were measured in a small model. For two families they equal chance.
"""


class ChannelUse(NamedTuple):
    """How the channels of a family are used, as means over its layers.

    Attributes:
        magnitudes: Mean magnitudes of the channels at equally distant ranks, the busiest first, as
            multiples of their mean; None if the file has none.
        share: Share of the values that is left out at each of ``SPARSITIES``.
        foreseen: Share of the active channels that are active in the layer that predicts them, at
            each of ``SPARSITIES``; None if it was not measured.
    """

    magnitudes: NDArray[np.float32] | None
    share: Share
    foreseen: NDArray[np.float32] | None


def channel_uses(contents: Contents) -> dict[str, ChannelUse]:
    """Return how a channel file says that the channels of each family are used."""
    families: dict[str, list[tuple[int, str]]] = {}
    for key in contents.thresholds:
        families.setdefault(key[1], []).append(key)
    return {
        family: ChannelUse(
            _mean(contents.magnitudes, keys),
            np.mean([contents.shares[key] for key in keys], axis=0, dtype=np.float32),
            _mean(contents.foreseen, keys),
        )
        for family, keys in families.items()
    }


def means_of(use: ChannelUse | None, family: str, n_channels: int) -> Shares:
    """Return the mean magnitude of each channel, busiest first; typical ones if none are known."""
    if use is None or use.magnitudes is None or not use.magnitudes.any():
        return typical_means(family, n_channels)
    ranks = (np.arange(n_channels) + 0.5) / n_channels
    known = (np.arange(len(use.magnitudes)) + 0.5) / len(use.magnitudes)
    return np.interp(ranks, known, use.magnitudes.astype(np.float64))


def assumed_foreseen(family: str) -> NDArray[np.float32]:
    """Return the share of active channels that are foreseen in models that were not measured.

    The excess over chance at half sparsity (``SIMILARITY``) is taken for all sparsities.
    """
    sparsities = np.array(SPARSITIES, np.float32)
    excess = (SIMILARITY[family] - 0.5) / 0.5
    return 1 - sparsities * np.float32(1 - excess)


# -- inside --------------------------------------------------------------------------------------


def _mean(
    known: Mapping[tuple[int, str], NDArray[np.float32]] | None, keys: list[tuple[int, str]]
) -> NDArray[np.float32] | None:
    if known is None:
        return None
    return np.mean([known[key] for key in keys], axis=0, dtype=np.float32)
