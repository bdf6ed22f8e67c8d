"""Interface of every system, and its setting."""

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
"""Part of the budget for Python, threads, the allocator and pages on their way to disk."""
_LEAST_ROOM = 1 << 20


class BudgetTooSmallError(ValueError):
    """The budget is too small for one context of full length."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Model, folder, budget and contexts of a system.

    Attributes:
        model: GGUF file.
        token_bytes: Bytes of one f16 cell of the model.
        folder: Empty folder for the system's files.
        budget: Bytes for everything that contexts need, engine cells included.
        contexts: Number of contexts.
        max_tokens: Length limit of a context in tokens.
        options: Options of the system.
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
    """Sources of a context's tokens when the context entered the engine.

    Attributes:
        n_resident: Tokens that were in the engine's cells.
        n_ram: Tokens that came from other memory.
        n_disk: Tokens that were read from disk.
        n_computed: Tokens that were evaluated again within the measured time.
        n_missing: Tokens that must still be evaluated again; the replay charges their cost.
    """

    n_resident: int = 0
    n_ram: int = 0
    n_disk: int = 0
    n_computed: int = 0
    n_missing: int = 0


class System(ABC):
    """A way to keep contexts. Calls come as ``enter``, ``grow``, ``leave``, ``background``."""

    def __init__(self, setting: Setting, geometry: KVGeometry) -> None:
        """Start without contexts."""
        if geometry.token_bytes != setting.token_bytes:
            raise ValueError(f"found {geometry.token_bytes} bytes a cell, expected {setting}")
        self.setting = setting
        self._cells = SyntheticCells(geometry)

    @property
    def lent_bytes(self) -> int:
        """Bytes beyond the budget that the system may use; the system's docstring says why."""
        return 0

    @property
    @abstractmethod
    def n_cells(self) -> int:
        """Number of cells in the engine's cache."""

    @property
    def cell_bytes(self) -> int:
        """Bytes of memory that the cells take before the first call."""
        return self.n_cells * self.setting.token_bytes

    @abstractmethod
    def enter(self, step: Step) -> Entered:
        """Bring ``step.before`` into the engine, with room for the tokens that the call adds.

        The time of this method is the switch latency.
        """

    def grow(self, step: Step, entered: Entered) -> None:
        """Put ``step.after`` into the engine in place of evaluation; this time is not measured."""
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
        """Do the work after the reply that the caller waits for."""

    def background(self, step: Step, idle_s: float) -> None:  # noqa: B027  likewise
        """Work ahead of time; the next call comes after ``idle_s``, even if work is left."""

    @abstractmethod
    def cells(self, step: Step) -> NDArray[np.uint8]:
        """Return the engine's cells of the context of ``step``, as one blob."""

    def status(self) -> Mapping[str, Any]:
        """Return the system's report about itself, as plain JSON types."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Free all memory and files."""

    # -- parts of ``grow`` ------------------------------------------------------------------------

    @abstractmethod
    def _cut(self, context: int, n_tokens: int) -> None:
        """Drop the context's cells in the engine after its first ``n_tokens`` tokens."""

    @abstractmethod
    def _append(self, context: int, blob: NDArray[np.uint8]) -> None:
        """Append cells to the context in the engine."""

    @abstractmethod
    def _grown(self, step: Step) -> None:
        """Record that the context now has ``step.after``."""


def app_cells(max_tokens: int) -> int:
    """Return the number of cells for an app with one context at a time."""
    return -(-max_tokens // BLOCK_CELLS) * BLOCK_CELLS


def room_beside_cells(setting: Setting) -> int:
    """Return the bytes of the budget that are left beside one context's cells.

    Raises:
        BudgetTooSmallError: Less than 1 MiB is left.
    """
    room = setting.budget - SLACK_BYTES - app_cells(setting.max_tokens) * setting.token_bytes
    if room < _LEAST_ROOM:
        raise BudgetTooSmallError(f"{setting.budget} bytes leave {room} beside one context's cells")
    return room
