"""What every system does at a call, and what it is given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.switching.engine import BLOCK_CELLS
from llmaas_eval.switching.steps import Step
from llmaas_eval.switching.synthetic import PIECE_TOKENS, SyntheticCells
from llmaas_plugins._native import KVGeometry

__all__ = [
    "SLACK_BYTES",
    "BudgetTooSmallError",
    "Entered",
    "Setting",
    "System",
    "app_cells",
    "room_beside_cells",
]

SLACK_BYTES = 16 << 20
"""Of the budget, left to Python, threads, the allocator and pages on their way to disk."""
_LEAST_ROOM = 1 << 20


class BudgetTooSmallError(ValueError):
    """A system cannot run one context of full length in its budget."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a system runs.

    Attributes:
        model: GGUF file.
        token_bytes: Of one of its f16 cells.
        folder: For its files; empty.
        budget: Bytes for everything that contexts need, engine cells included.
        contexts: Number of them.
        max_tokens: Longest context.
        options: The system's own.
    """

    model: Path
    token_bytes: int
    folder: Path
    budget: int
    contexts: int
    max_tokens: int
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Entered:
    """How the tokens that a context had came to be in the engine.

    Attributes:
        n_resident: They were in its cells.
        n_ram: They came from other memory.
        n_disk: They were read.
        n_computed: They were evaluated again, in the time that was measured.
        n_missing: They must be evaluated again; the replay charges that.
    """

    n_resident: int = 0
    n_ram: int = 0
    n_disk: int = 0
    n_computed: int = 0
    n_missing: int = 0


class System(ABC):
    """A way to keep contexts. Calls come as ``enter``, ``grow``, ``leave``, ``background``."""

    def __init__(self, setting: Setting, geometry: KVGeometry) -> None:
        """Start with no context."""
        if geometry.token_bytes != setting.token_bytes:
            raise ValueError(f"found {geometry.token_bytes} bytes a cell, expected {setting}")
        self.setting = setting
        self._cells = SyntheticCells(geometry)

    @property
    def lent_bytes(self) -> int:
        """Bytes that it is given beyond the budget; why, the system says."""
        return 0

    @property
    @abstractmethod
    def n_cells(self) -> int:
        """Cells of the engine's cache."""

    @property
    def cell_bytes(self) -> int:
        """Memory that the cells take before the first call."""
        return self.n_cells * self.setting.token_bytes

    @abstractmethod
    def enter(self, step: Step) -> Entered:
        """Bring ``step.before`` into the engine, with room for what the call adds.

        This is what the switch latency is measured of.
        """

    def grow(self, step: Step, entered: Entered) -> None:
        """Stand in for evaluation: ``step.after`` is in the engine now. Not measured."""
        n_kept = len(step.before) - entered.n_missing
        if step.slides:
            self._cut(step.context, 0)
            n_kept = 0
        for start in range(n_kept, len(step.after), PIECE_TOKENS):
            n_tokens = min(PIECE_TOKENS, len(step.after) - start)
            blob = self._cells.blob(step.context, step.window, start, n_tokens)
            self._append(step.context, blob)
        self._grown(step)

    def leave(self, step: Step) -> None:  # noqa: B027  most do nothing
        """Do what the caller waits for after the reply."""

    def background(self, step: Step, idle_s: float) -> None:  # noqa: B027  likewise
        """Work ahead of time; the next call comes after ``idle_s``, whether it is done or not."""

    @abstractmethod
    def cells(self, step: Step) -> NDArray[np.uint8]:
        """The engine's cells of the context that ``step`` was for, as one blob."""

    def status(self) -> Mapping[str, Any]:
        """What it says of itself at the end, as plain JSON types."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Free everything."""

    # -- what ``grow`` needs ----------------------------------------------------------------------

    @abstractmethod
    def _cut(self, context: int, n_tokens: int) -> None:
        """Drop the cells of the context in the engine behind the first ``n_tokens``."""

    @abstractmethod
    def _append(self, context: int, blob: NDArray[np.uint8]) -> None:
        """Add cells to the context in the engine."""

    @abstractmethod
    def _grown(self, step: Step) -> None:
        """Take note that the context has ``step.after`` now."""


def app_cells(max_tokens: int) -> int:
    """Cells that an app asks for which has one context at a time."""
    return -(-max_tokens // BLOCK_CELLS) * BLOCK_CELLS


def room_beside_cells(setting: Setting) -> int:
    """Bytes that the budget leaves beside the cells of one context.

    Raises:
        BudgetTooSmallError: Hardly any.
    """
    room = setting.budget - SLACK_BYTES - app_cells(setting.max_tokens) * setting.token_bytes
    if room < _LEAST_ROOM:
        raise BudgetTooSmallError(f"{setting.budget} bytes leave {room} beside one context's cells")
    return room
