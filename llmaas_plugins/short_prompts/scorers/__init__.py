"""Estimates of how much an answer needs each word of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from llmaas_hooks import NativeContext
from llmaas_plugins.short_prompts.scorer import Scorer
from llmaas_plugins.short_prompts.scorers.attention import Attention
from llmaas_plugins.short_prompts.scorers.positions import First, Last, Random
from llmaas_plugins.short_prompts.scorers.self_information import SelfInformation

__all__ = ["SCORERS"]

SCORERS: Mapping[str, Callable[[Mapping[int, NativeContext]], Scorer]] = {
    "attention": Attention,
    "first": lambda _natives: First(),
    "last": lambda _natives: Last(),
    "random": lambda _natives: Random(),
    "self_information": SelfInformation,
}
"""Scorers that need no trained model, by name.

Each is made for one model, whose time it measures, with the contexts that the hook
``llmaas_native_context`` was given, by address.
"""
