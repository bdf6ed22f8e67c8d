"""Contract between the host and its plugins: hooks, types and errors.

A plugin is a class that an entry point of the group ``llmaas_plugins`` names::

    from llmaas_hooks import LogitsView, hookimpl
    from pydantic import BaseModel, ConfigDict

    class Plugin:
        class Config(BaseModel):
            model_config = ConfigDict(frozen=True, extra="forbid")
            token: int = 13

        def __init__(self, config: Config) -> None:
            self.config = config

        @hookimpl
        def llmaas_logits(self, view: LogitsView) -> None:
            view.logits[self.config.token] = -float("inf")

This package imports neither llama_cpp nor torch.
"""

from __future__ import annotations

from llmaas_hooks.drafts import Drafter, Guess, Pick, Proposal
from llmaas_hooks.errors import (
    BudgetError,
    CodecError,
    ConfigError,
    IncompatibleError,
    LimitError,
    LlmaasError,
    PluginError,
    StoreError,
    UnknownPluginError,
    UnmetBudgetError,
)
from llmaas_hooks.levels import Levels
from llmaas_hooks.manager import HookManager
from llmaas_hooks.markers import NAME, hookimpl
from llmaas_hooks.memory import MemoryClaim
from llmaas_hooks.native import (
    AttentionDensity,
    CellMemory,
    ChannelColumns,
    ChannelOperand,
    FileWeights,
    HiddenStates,
    LowRank,
    NativeContext,
    Subscription,
    TensorInfo,
    WeightClaim,
)
from llmaas_hooks.parked import ParkedSequences
from llmaas_hooks.promises import (
    NO_PROMISE,
    LevelTimes,
    Limit,
    Promise,
    RequestCost,
    ShorterPrompt,
)
from llmaas_hooks.request_scope import RequestScope, serving_context
from llmaas_hooks.request_stats import RequestStats
from llmaas_hooks.seats import Seat
from llmaas_hooks.tokens import common_prefix
from llmaas_hooks.types import (
    ContextCreate,
    DecodeStep,
    Engine,
    FileStamp,
    KVRestored,
    LogitsView,
    ModelFile,
    ModelLoad,
    Override,
    Plugin,
    Request,
    Tokens,
)

__all__ = [
    "NAME",
    "NO_PROMISE",
    "AttentionDensity",
    "BudgetError",
    "CellMemory",
    "ChannelColumns",
    "ChannelOperand",
    "CodecError",
    "ConfigError",
    "ContextCreate",
    "DecodeStep",
    "Drafter",
    "Engine",
    "FileStamp",
    "FileWeights",
    "Guess",
    "HiddenStates",
    "HookManager",
    "IncompatibleError",
    "KVRestored",
    "LevelTimes",
    "Levels",
    "Limit",
    "LimitError",
    "LlmaasError",
    "LogitsView",
    "LowRank",
    "MemoryClaim",
    "ModelFile",
    "ModelLoad",
    "NativeContext",
    "Override",
    "ParkedSequences",
    "Pick",
    "Plugin",
    "PluginError",
    "Promise",
    "Proposal",
    "Request",
    "RequestCost",
    "RequestScope",
    "RequestStats",
    "Seat",
    "ShorterPrompt",
    "StoreError",
    "Subscription",
    "TensorInfo",
    "Tokens",
    "UnknownPluginError",
    "UnmetBudgetError",
    "WeightClaim",
    "common_prefix",
    "hookimpl",
    "serving_context",
]
