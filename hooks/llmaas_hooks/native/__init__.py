"""Access to the engine: claim weights, choose parts of them, and tap what graphs compute.

C code does the work, on the threads that compute the graph; see docs/explanation/engine.md.
"""

from __future__ import annotations

from llmaas_hooks.native.cells import CellMemory
from llmaas_hooks.native.context import NativeContext
from llmaas_hooks.native.low_rank import LowRank
from llmaas_hooks.native.taps import (
    Activation,
    AttentionDensity,
    HiddenStates,
    Magnitudes,
    Moments,
    Overlap,
    States,
    Subscription,
)
from llmaas_hooks.native.weights import (
    ChannelColumns,
    ChannelOperand,
    FileWeights,
    TensorInfo,
    WeightClaim,
)

__all__ = [
    "Activation",
    "AttentionDensity",
    "CellMemory",
    "ChannelColumns",
    "ChannelOperand",
    "FileWeights",
    "HiddenStates",
    "LowRank",
    "Magnitudes",
    "Moments",
    "NativeContext",
    "Overlap",
    "States",
    "Subscription",
    "TensorInfo",
    "WeightClaim",
]
