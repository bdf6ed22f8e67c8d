"""State of an engine that belongs to the request in progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["OUTPUTS", "Left", "Outputs"]

OUTPUTS = "_llmaas_outputs"
"""Attribute of a ``LlamaBatch``: the ``Outputs`` of its engine."""


@dataclass(slots=True)
class Outputs:
    """Tokens of an engine's batches that give logits which the app did not ask for.

    Attributes:
        ctx: Address of the context.
        app_reads_all: Whether the app created its ``Llama`` with ``logits_all``.
        first: First position from which all tokens give logits; None outside of prompts.
        wants: Function of a batch's size: whether all of its tokens give logits.
    """

    ctx: int
    app_reads_all: bool
    first: int | None = None
    wants: Callable[[int], bool] | None = None


class Left(NamedTuple):
    """State that ``Llama`` holds of a request beside its cells.

    Attributes:
        sampler: Chain of samplers, with the tokens that its penalties and grammar have seen.
        seed: Seed of the samplers that are made next.
        n_said: The engine's ``n_said``.
        app_drafts: The engine's ``app_drafts``.
    """

    sampler: Any
    seed: int
    n_said: int
    app_drafts: bool
